"""All gradients of a model in one flat buffer, so that an exchange is one operation and not one per parameter.

Here: `GradientBuffer`. Each parameter's `.grad` is a view into a flat tensor that the collective provided. Into a large
one backward writes straight, so that it can be exchanged meanwhile: autograd then adds to what is there, which has to
be zero before. Small ones are cheaper to copy: autograd leaves each gradient where it made it, and `attach` moves them.
A few piggybacked values follow the gradients (`piggybacked`): what all workers must agree on in every step (the loss, a
request to stop) needs no exchange of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from syncline.comms.collective import Collective
from syncline.comms.serialize import as_memory, bytes_to_tensor
from syncline.strategies.flat import dense_strides

ABSENT, DENSE, SPARSE = 0, 1, 2
"""What gradient a parameter has."""

_SMALL_BYTES = 4 * 2**20
"""Buffers up to this size are not exchanged during backward (`overlap.py`)."""


class GradientBuffer:
    """The gradients of `parameters`, flat: one buffer per dtype, and `piggybacked` extra float32 numbers.

    A worker alone exchanges nothing, so its gradients stay where autograd puts them, unless they are wanted
    flat all the same.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Collective,
        piggybacked: int,
        *,
        is_flat: bool | None = None,
        keeps_local: bool = False,
    ) -> None:
        self.keeps_local = keeps_local
        """Whether a user's own loop makes the gradients. Then each worker's own are kept until they are combined, and
        parameters that are frozen now are included: the loop may train them later."""
        self.parameters = [p for p in parameters if p.requires_grad or keeps_local]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {torch.float32: []}
        is_flat = collective.size > 1 if is_flat is None else is_flat
        for p in self.parameters if is_flat else ():
            by_dtype.setdefault(p.dtype, []).append(p)
        self.members = list(by_dtype.values())
        """The parameters whose gradients each of the `flats` holds, in order."""
        self.flats: list[torch.Tensor] = []
        self.places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        """Where each parameter's gradient begins and ends in its flat buffer."""
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for dtype, members in by_dtype.items():
            extra = piggybacked if dtype == torch.float32 else 0
            count = sum(p.numel() for p in members)
            flat = collective.allocate(count + extra, dtype, device)
            self.flats.append(flat)
            if dtype == torch.float32:
                self.piggybacked = flat[count:]
            offset = 0
            for p in members:
                # The parameter's own strides, so that a channels-last weight gets a channels-last gradient.
                view = flat.as_strided(p.shape, dense_strides(p), flat.storage_offset() + offset)
                self._views.append((p, view))
                self.places[p] = (offset, offset + p.numel())
                offset += p.numel()
        self._is_copied = all(flat.numel() * flat.element_size() <= _SMALL_BYTES for flat in self.flats)
        """Whether autograd makes gradients anew in every step; also for a worker alone, whose buffer has them."""
        self._local: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        if not keeps_local:
            self.attach()

    @property
    def numel(self) -> int:
        """How many gradient numbers there are."""
        return sum(p.numel() for p in self.parameters)

    def zero_(self) -> None:
        """Forget the gradients and piggybacked values, keep the memory."""
        if self._is_copied:
            self.piggybacked.zero_()
            for p in self.parameters:
                p.grad = None
            return
        for flat in self.flats:
            flat.zero_()

    def attach(self) -> None:
        """Make every `.grad` a view of the buffer; what was put there otherwise is copied in first.

        A user's own `zero_grad(set_to_none=True)` takes the views away: a missing gradient then counts as zero, and one
        that autograd made anew is moved here.
        """
        views, made_anew = [], []
        self._local = []
        for p, view in self._views:
            grad = p.grad
            if self.keeps_local:
                self._local.append((p, view.clone() if grad is view else grad))
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                made_anew.append(grad.to_dense())  # some layers make sparse ones
            p.grad = view
        if views:
            torch._foreach_copy_(views, made_anew)

    def in_memory_order(self) -> list[torch.nn.Parameter]:
        """The parameters as `present` has them; none for a worker alone."""
        return [p for p, _ in self._views]

    @property
    def kinds(self) -> list[int]:
        """What gradient each parameter had when `attach` was called; needs `keeps_local`."""
        return [kind_of(grad) for _, grad in self._local]

    def restore_local(self) -> None:
        """Undo `attach`: the exchange has failed, and may have left anything in the buffer."""
        for p, grad in self._local:
            p.grad = grad
        self._local = []

    def release_local(self, kinds: list[int], collective: Collective | None = None) -> None:
        """The gradients are combined, and of these `kinds` over all workers. The absent ones are, as in one process.

        Sparse ones are sparse again, with the rows of all workers of the `collective`; a worker without a gradient has
        no rows.
        """
        for (p, grad), kind in zip(self._local, kinds, strict=True):
            if kind == ABSENT:
                p.grad = None
            elif collective is not None and kind == SPARSE:
                rows = grad.coalesce().indices()[0] if grad is not None else torch.empty(0, dtype=torch.int64)
                p.grad = _sparse(p.grad, rows, collective)
        self._local = []


def kind_of(gradient: torch.Tensor | None) -> int:
    return ABSENT if gradient is None else SPARSE if gradient.is_sparse else DENSE


def kind_over_all(kinds: Iterable[int]) -> int:
    """The kind of a parameter's gradient that is the sum of such ones: a dense one makes it dense."""
    found = set(kinds)
    return DENSE if DENSE in found else SPARSE if SPARSE in found else ABSENT


def _sparse(summed: torch.Tensor | None, rows: torch.Tensor, collective: Collective) -> torch.Tensor:
    """The rows of `summed` that any worker has; each gives its own `rows`."""
    assert summed is not None, "attached before it was summed"
    gathered = [bytes_to_tensor(part).view(torch.int64) for part in collective.all_gather(as_memory(rows).tobytes())]
    union = torch.unique(torch.cat(gathered))
    return torch.sparse_coo_tensor(union.unsqueeze(0), summed[union], summed.shape, is_coalesced=True)
