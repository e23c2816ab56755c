"""The small set of things that all workers of a View do together.

Here: the `Collective` protocol and `Solo`, its one-worker implementation, which also shows that the protocol
is sufficient. Not here: the implementations for many workers (`shared_memory.py`, `process_group.py`), who is
a member (coordinator), and what is exchanged when (strategies).

All methods except `abort` are called by every rank in the same order with the same shapes. A call that cannot
be completed raises `PeerLost`; the tensor it was working on is then garbage.
"""

from __future__ import annotations

from typing import Protocol

import torch

from syncline.errors import PeerLost

__all__ = ["Collective", "Solo"]


class Collective(Protocol):
    """What the workers of one View can do together."""

    @property
    def rank(self) -> int:
        """This worker's place, from 0 to `size` - 1."""

    @property
    def size(self) -> int:
        """How many workers take part."""

    @property
    def bytes_sent(self) -> int:
        """What this worker has made known to the others so far, in bytes; each thing counts once, whoever reads it."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor that `sum_` combines without copying it first, where the transport can."""

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Replace `tensor` by the sum over all ranks of `weight * tensor`: the same bits on every rank.

        Each rank passes its own weight, so a weighted mean over unequal shares costs no extra pass.
        """

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with what it holds on rank `source`."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def abort(self) -> None:
        """Make calls in progress and later calls raise `PeerLost`. Safe from any thread, at any time."""

    def close(self) -> None:
        """Release what this rank holds; the others are not needed for it."""


class Solo:
    """One worker alone: every exchange is the identity, up to the weight."""

    rank = 0
    size = 1
    bytes_sent = 0

    def __init__(self) -> None:
        self._aborted = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: there is nobody to share it with."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Scale by the weight."""
        self._check()
        if weight != 1.0:
            tensor.detach().mul_(weight)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Nothing to do."""
        del tensor, source
        self._check()

    def gather(self, payload: bytes) -> list[bytes]:
        """The payload itself."""
        self._check()
        return [payload]

    def barrier(self) -> None:
        """Nobody to wait for."""
        self._check()

    def abort(self) -> None:
        """Later calls raise `PeerLost`."""
        self._aborted = True

    def close(self) -> None:
        """Nothing is held."""

    def _check(self) -> None:
        if self._aborted:
            raise PeerLost("The run was aborted.")
