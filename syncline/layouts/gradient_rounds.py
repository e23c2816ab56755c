"""Gradients that workers sum in rounds during a backward pass, each worker its own part.

Here: `GradientRounds`. A round is complete when backward has made the gradients of all parameters in it. Then each
worker copies its own into shared memory, and sums its part of what all workers have put there; the rest is not kept.
Not here: which numbers a round has (`shards.py`), and what is done with the sums (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.layouts.shards import Range, SumRound
from syncline.strategies.flat import dense_strides


class GradientRounds:
    """One worker's side of summing the gradients of `parameters`, which lie in `sums` one after another.

    `staging` is shared by all workers: two slots, each with room for a round of every worker.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rounds: Sequence[SumRound],
        sums: torch.Tensor,
        staging: torch.Tensor,
        collective: Collective,
    ) -> None:
        self._parameters, self._rounds, self._staging, self._collective = parameters, rounds, staging, collective
        self._owned_ranges = [round.owned(collective.rank, collective.size) for round in rounds]
        self.owned = [sums[low:high] for low, high in self._owned_ranges]
        """What this worker sums, round by round."""
        self.bytes_sent = 0
        self._weight: float | None = None  # while a backward pass completes gradients
        self._places: list[Range] = []
        self._rounds_of: dict[nn.Parameter, list[int]] = {p: [] for p in parameters}
        for number, round in enumerate(rounds):
            for n in round.parameters:
                self._rounds_of[parameters[n]].append(number)
        start = 0
        for p in parameters:
            self._places.append(Range(start, start + p.numel()))
            start += p.numel()
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in parameters
        ]
        self._begin()

    def _begin(self) -> None:
        self._weight, self._next = None, 0
        self._missing = [len(round.parameters) for round in self._rounds]

    def begin_last_pass(self, weight: float) -> None:
        """Sum gradients from now on as they become complete; until then, micro-batches add to each other's."""
        self._weight = weight

    def finish(self, weight: float) -> None:
        """Sum the rounds that are left, with zeros for gradients that this worker has not computed."""
        while self._next < len(self._rounds):
            self._sum_next(weight)
        self._begin()

    def close(self) -> None:
        """Remove the hooks from the parameters: nothing is summed any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, p: nn.Parameter) -> None:
        if self._weight is None:
            return
        for number in self._rounds_of[p]:
            self._missing[number] -= 1
        while self._next < len(self._rounds) and self._missing[self._next] <= 0:
            self._sum_next(self._weight)

    def _sum_next(self, weight: float) -> None:
        number, collective = self._next, self._collective
        slot, (low, high) = self._staging[number % 2], self._rounds[number].whole
        self._fill(slot[collective.rank], self._rounds[number], weight)
        self._next += 1
        # A slot is filled again two rounds later: then all have reached the barrier of the next round, after this sum.
        collective.barrier()
        mine = self._owned_ranges[number]
        parts, summed = slot[:, mine.low - low : mine.high - low], self.owned[number]
        torch.add(parts[0], parts[1], out=summed)
        for other in parts[2:]:
            summed.add_(other)
        self.bytes_sent += (high - low) * slot.element_size()

    def _fill(self, out: torch.Tensor, round: SumRound, weight: float) -> None:
        """Write this worker's gradients of a round; those that no later round needs are freed."""
        low, high = round.whole
        for n in round.parameters:
            p, (start, end) = self._parameters[n], self._places[n]
            first, last = max(start, low), min(end, high)
            if p.grad is None:
                out[first - low : last - low].zero_()
                continue
            torch.mul(in_memory_order(p)[first - start : last - start], weight, out=out[first - low : last - low])
            if start >= low:  # rounds go from the end to the beginning
                p.grad = None


def in_memory_order(p: nn.Parameter) -> torch.Tensor:
    """The gradient of `p` as one vector, in the order in which the parameter lies in memory."""
    gradient = p.grad
    assert gradient is not None, "checked before"
    strides = dense_strides(p)
    if gradient.stride() != strides or gradient.is_sparse:
        gradient = torch.empty_strided(p.shape, strides, dtype=p.dtype).copy_(gradient.to_dense())
    return gradient.as_strided((p.numel(),), (1,))
