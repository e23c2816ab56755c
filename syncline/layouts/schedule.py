"""In which order a pipeline stage computes its micro-batches.

Here: pure functions. `1f1b` (Narayanan et al. 2019, PipeDream-Flush) computes forward passes only until the next stage
has something to return, then one forward and one backward pass in turn, so that at most as many micro-batches are in
flight as there are stages left. `gpipe` (Huang et al. 2019) computes all forward passes first. Both have a bubble of
(p - 1) / (m + p - 1) of the time, with p stages and m micro-batches. Gradients are added in the order of the
micro-batches either way, so the result is the same. Not here: computing (`stage_runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple


class Pass(NamedTuple):
    """One pass over one micro-batch."""

    direction: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """The passes of `stage`: some forward, then forward and backward in turn, then the remaining backward."""
    ahead = min(stages - stage - 1, micro_batches)
    for number in range(ahead):
        yield Pass("forward", number)
    for number in range(ahead, micro_batches):
        yield Pass("forward", number)
        yield Pass("backward", number - ahead)
    for number in range(micro_batches - ahead, micro_batches):
        yield Pass("backward", number)


def all_forward_first(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """All forward passes, then all backward passes."""
    del stage, stages
    for number in range(micro_batches):
        yield Pass("forward", number)
    for number in range(micro_batches):
        yield Pass("backward", number)


SCHEDULES: Mapping[str, Callable[[int, int, int], Iterator[Pass]]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": all_forward_first,
}


def bubble(stages: int, micro_batches: int) -> float:
    """The part of the time in which a stage waits for others, if all take equally long."""
    return (stages - 1) / (micro_batches + stages - 1)
