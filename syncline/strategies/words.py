"""A strategy in words: who sends what to whom, when, and how many bytes that is."""

from __future__ import annotations

from syncline.strategies.how import Exact
from syncline.strategies.strategy import Strategy
from syncline.strategies.what import Gradients, Updates

__all__ = ["bytes_per_exchange", "in_words"]


def bytes_per_exchange(strategy: Strategy, parameters: int) -> int:
    """What one worker makes known to the others in one exchange, by theory."""
    return strategy.how.codec().wire_bytes(parameters)


def in_words(strategy: Strategy, workers: int, parameters: int) -> list[str]:
    """The strategy as a person would tell it, for a model of so many parameters."""
    if workers == 1:
        return ["There is only one worker: nothing is exchanged."]
    steps = strategy.when.steps
    rhythm = "After each backward pass" if isinstance(strategy.what, Gradients) else f"Every {steps} steps"
    if steps == 1 and isinstance(strategy.what, Updates):
        rhythm = "After each step"
    what = {
        Gradients: "all workers sum their gradients, and each applies the sum",
        Updates: "all workers average what they have changed since the last time",
    }[type(strategy.what)]
    lines = [f"{rhythm} {what}."]
    if isinstance(strategy.what, Updates):
        lines.append(f"The average is applied by the outer optimiser {strategy.what.outer!r}.")
        if strategy.what.optimizer_state:
            lines.append("The optimisers' own state is averaged, too.")
    sent, exact = bytes_per_exchange(strategy, parameters), 4 * parameters
    size = f"{sent / 1e6:.3g} MB" if sent >= 1e5 else f"{sent:,} bytes"
    each_step = f" ({sent / steps / 1e6:.3g} MB a step)" if steps > 1 else ""
    less = (
        "" if isinstance(strategy.how, Exact) else f", {exact / sent:.3g} times less than exact; the rest is sent later"
    )
    lines.append(f"Each worker sends {size} for {parameters:,} parameters{each_step}{less}.")
    return lines
