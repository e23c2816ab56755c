"""Workers that put together an activation of which each has computed a part.

Here: `ActivationExchange`, which passes parts through memory that all workers share, a few megabytes at a time. What it
returns is a copy in ordinary memory, which autograd may keep as long as it wants. Not here: what is computed
(`divided_layers.py`).

The memory has two slots, used in turn, which saves a barrier: a worker fills a slot again only when all have reached
the barrier of the turn in between, and so have read it.
"""

from __future__ import annotations

import torch

from syncline.comms.collective import Collective
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.compute.partition import split
from syncline.errors import ConfigError
from syncline.layouts.tensor_split import refusal

_SLOT_BYTES = 2**22
"""How much is exchanged at a time: enough that barriers do not matter, and not more than caches hold."""
_MASK = 2**63 - 1


class ActivationExchange:
    """One worker's side of it. All workers make the same calls in the same order, this constructor included."""

    def __init__(self, collective: Collective, *, slot_bytes: int = _SLOT_BYTES) -> None:
        self.rank, self.size = collective.rank, collective.size
        self.bytes_sent = self.shared_bytes = 0
        self._collective = collective
        self._turns = 0
        self._slot_bytes = slot_bytes
        self._slots = self._allocate(2 * slot_bytes, torch.uint8).view(2, -1)
        self._tags = self._allocate(2 * self.size, torch.int64).view(2, -1).numpy()

    def gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill the `whole` (outer, width, inner), of which each worker has a `part`: its share of the width."""
        outer, width, inner = whole.shape
        if not whole.numel():
            return
        if self.size == 1:
            whole.copy_(part)
            return
        rows = self._rows_at_a_time(width * inner * whole.element_size())
        for start in range(0, outer, rows):
            self._take_turn(part[start : start + rows], whole[start : start + rows])

    def _take_turn(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        rows, width, inner = whole.shape
        number, self._turns = self._turns % 2, self._turns + 1
        slot, tag = self._slots[number].view(whole.dtype), self._tag(whole)
        places = [
            (low, high, slot[rows * low * inner : rows * high * inner].view(rows, high - low, inner))
            for low, high in split(width, self.size)
        ]
        places[self.rank][2].copy_(part)
        self._tags[number, self.rank] = tag
        self._collective.barrier()
        if not (self._tags[number] == tag).all():
            raise _out_of_step(int((self._tags[number] != tag).argmax()), self.rank)
        for rank, (low, high, place) in enumerate(places):
            whole[:, low:high].copy_(part if rank == self.rank else place)
        self.bytes_sent += part.numel() * part.element_size()

    def _tag(self, whole: torch.Tensor) -> int:
        """What this turn exchanges. If workers compute different things, they must not mix them up."""
        return hash((self._turns, *whole.shape, whole.element_size())) & _MASK

    def _rows_at_a_time(self, row_bytes: int) -> int:
        if row_bytes > self._slot_bytes:  # a single row is larger, as the first images of a large network are
            self._slot_bytes = 2 ** (row_bytes - 1).bit_length()
            self._slots = self._allocate(2 * self._slot_bytes, torch.uint8).view(2, -1)
        return self._slot_bytes // row_bytes

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.shared_bytes += numel * dtype.itemsize
        try:
            return self._collective.allocate_shared(numel, dtype)
        except SharedMemoryFull as error:
            why = f"activations are exchanged in shared memory, and there is not enough: {error}"
            raise refusal(why, "shared-memory", nearest="replicated", instead="--shared-memory-limit-mb") from error


def _out_of_step(other: int, rank: int) -> ConfigError:
    return ConfigError(
        f"The workers of a replica are out of step: rank {other} computes another layer, or another number of samples, "
        f"than rank {rank}. A model in this layout must do the same on all workers: check for conditions on the rank, "
        "the time, or random numbers of its own. Use --layout replicated for a model that needs them.",
        code="out-of-step",
        rank=rank,
        other=other,
    )
