"""Summing gradients while the backward pass is still computing others.

Here: `OverlappedAllReduce`, which cuts a flat gradient buffer into parts of a few megabytes and notices when autograd
has completed each, and `overlapped_allreduces`, which makes one where the workers share memory and the model is large
enough. Not here: how parts are added up (`comms/overlapped_sum.py`).

Backward goes from the last layer to the first, and the buffer holds the gradients in the order of the layers, so its
end is complete first. The piggybacked values, behind all gradients, are written when backward is over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from syncline.comms.overlapped_sum import OverlappedSum
from syncline.comms.shared_memory import SharedMemory
from syncline.strategies.exchange import Replica

_PART_BYTES = 4 * 2**20
"""Smaller parts would cost more calls than they hide, larger ones would be complete too late."""


def overlapped_allreduces(replica: Replica) -> dict[int, OverlappedAllReduce]:
    """By number, those of the flat buffers that are worth it."""
    collective, gradients = replica.collective, replica.gradients
    if not isinstance(collective, SharedMemory) or gradients.keeps_local:
        return {}  # the sums of an own loop's gradients begin after backward
    found = {}
    for number, (flat, members) in enumerate(zip(gradients.flats, gradients.members, strict=True)):
        places = [gradients.places[p] for p in members]
        groups = cut([high - low for low, high in places], _PART_BYTES // flat.element_size())
        if len(groups) < 2:
            continue
        bounds = [(places[first][0], places[last][1]) for first, last in reversed(groups)]
        if flat.numel() > places[-1][1]:
            bounds.append((places[-1][1], flat.numel()))  # the piggybacked values
        summing = collective.overlapped_sum(flat, bounds)
        if summing is not None:
            parameters = [members[first : last + 1] for first, last in reversed(groups)]
            found[number] = OverlappedAllReduce(summing, parameters)
    return found


def cut(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Neighbors in groups of at least `least` together, from the end; each group as its first and last member."""
    groups: list[tuple[int, int]] = []
    last, total = len(sizes) - 1, 0
    for k in range(len(sizes) - 1, -1, -1):
        total += sizes[k]
        if total >= least or k == 0:
            groups.append((k, last))
            last, total = k - 1, 0
    return groups[::-1]


class OverlappedAllReduce:
    """The sum of one flat buffer, begun before backward and finished after it; `parts` has each part's parameters."""

    def __init__(self, summing: OverlappedSum, parts: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self._summing = summing
        self._sizes = [len(parameters) for parameters in parts]
        self._missing = list(self._sizes)
        self._is_on = False
        self._hooks = list(self._watch(parts))

    def begin(self, weight: float) -> None:
        """The next backward pass completes the gradients."""
        self._missing = list(self._sizes)
        self._summing.begin(weight)
        self._is_on = True

    def finish(self, weight: float) -> None:
        """Backward is over, or was never announced: sum what is left."""
        if not self._is_on:
            self._summing.begin(weight)
        self._is_on = False
        self._summing.finish()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, parts: Sequence[Sequence[torch.nn.Parameter]]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for part, parameters in enumerate(parts):
            for p in parameters:
                assert p.grad is not None, "a view of the flat buffer"
                on_gradient = functools.partial(self._on_gradient, part, p.grad)
                yield p.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]  # torch's

    def _on_gradient(self, part: int, view: torch.Tensor, p: torch.Tensor) -> None:
        if not self._is_on or p.grad is not view:  # one that was put elsewhere is moved here after backward
            return
        self._missing[part] -= 1
        if not self._missing[part]:
            self._summing.complete(part)
