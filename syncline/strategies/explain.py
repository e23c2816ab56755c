"""A strategy explained: who sends what to whom, when, how many bytes that is, and what a worker failure costs.

Here: the two questions that are asked about any strategy. The answers are each method's own (`methods/`).
"""

from __future__ import annotations

from syncline.strategies.method import ModelShapes, Shapes
from syncline.strategies.switching import AnyStrategy


def expected_bytes_per_step(
    strategy: AnyStrategy, shapes: Shapes, *, workers: int, optimizer_slots: int = 0
) -> float | None:
    """What a worker sends in a step, as a mean over steps and workers; None where only a measurement can show it."""
    return strategy.method.bytes_per_step(ModelShapes(shapes), workers, optimizer_slots)


def explain(strategy: AnyStrategy, workers: int, shapes: Shapes) -> list[str]:
    """The strategy in sentences, for a model with these parameters."""
    if workers == 1:
        return ["There is only one worker: nothing is exchanged."]
    method = strategy.method
    return [line for line in [*method.explain(ModelShapes(shapes), workers), method.committed] if line]
