"""The small set of things that all workers of a View do together.

Here: the `Collective` protocol and `Solo`, its one-worker implementation, which also shows that the protocol
is sufficient. Not here: the implementations for many workers (`shared_memory.py`, `process_group.py`), who is
a member (coordinator), and what is exchanged when (strategies).

All methods except `abort` are called by every rank in the same order with the same shapes. A call that cannot
be completed raises `PeerLost`; the tensor it was working on is then garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from syncline.algorithms.mixing import mix, receivers
from syncline.errors import PeerLost

__all__ = ["Collective", "Solo", "check_mixing", "mixed", "takers"]


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
        """What this worker has made known to the others so far, in bytes.

        What is for everybody counts once, whoever reads it; what `mix_` hands on counts for each rank that takes it.
        """

    @property
    def waited_s(self) -> float:
        """For how many seconds this worker has waited for others so far; 0 where that cannot be told from sending."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor that `sum_` and `mix_` combine without copying it first, where the transport can."""

    def share(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """One zeroed flat CPU tensor that all ranks see: what one writes, the others read. No copies, no locks.

        `ConfigError` where the workers have no memory in common.
        """

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Replace `tensor` by the sum over all ranks of `weight * tensor`: the same bits on every rank.

        Each rank passes its own weight, so a weighted mean over unequal shares costs no extra pass.
        """

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Replace `tensor` by the sum over the ranks j that this rank takes from of `mixing[rank][j]` * (j's tensor).

        All ranks do so at the same time, from the values before, with the same mixing (`algorithms.mixing`). The sum
        is that of `algorithms.mixing.mix`, so float32 and float64 have the same bits with every transport. A tensor of
        integers can only be handed on whole: every rank takes from one rank, with weight 1.
        """

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with what it holds on rank `source`."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def hosts(self) -> list[int]:
        """On which host each rank is: the same number for the same host, counted from 0 in the order of the ranks."""

    def split(self, color: int) -> Collective:
        """A collective of those ranks that gave the same color, in the same order, which counts its bytes from 0.

        Whoever aborts or closes this collective does so with those split from it; the reverse does not hold.
        """

    def abort(self) -> None:
        """Make calls in progress and later calls raise `PeerLost`. Safe from any thread, at any time."""

    def close(self) -> None:
        """Release what this rank holds; the others are not needed for it."""


class Solo:
    """One worker alone: every exchange is the identity, up to the weight."""

    rank = 0
    size = 1
    bytes_sent = 0
    waited_s = 0.0

    def __init__(self) -> None:
        self._aborted = False
        self._children: list[Solo] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: there is nobody to share it with."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def share(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory, seen by all one of us."""
        self._check()
        return torch.zeros(numel, dtype=dtype)

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Scale by the weight."""
        self._check()
        if weight != 1.0:
            tensor.detach().mul_(weight)

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Scale by the weight of the one and only rank."""
        self._check()
        check_mixing(tensor, mixing, self.size)
        data = tensor.detach()
        data.copy_(mixed({0: data}, mixing[0]))

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

    def hosts(self) -> list[int]:
        """This one."""
        return [0]

    def split(self, color: int) -> Collective:
        """Alone again."""
        del color
        self._check()
        child = Solo()
        self._children.append(child)
        return child

    def abort(self) -> None:
        """Later calls raise `PeerLost`."""
        self._aborted = True
        for child in self._children:
            child.abort()

    def close(self) -> None:
        """Nothing is held."""

    def _check(self) -> None:
        if self._aborted:
            raise PeerLost("The run was aborted.")


def check_mixing(tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]], size: int) -> None:
    """`ValueError` unless `mixing` fits `size` ranks and `tensor`; on all ranks alike, so that nobody waits."""
    everybody = set(range(size))
    wrong = [rank for rank, weights in mixing.items() if not weights or not everybody.issuperset(weights)]
    if set(mixing) != everybody or wrong:
        raise ValueError(
            f"A mixing of {size} workers names for each of the ranks 0 to {size - 1} those of them that it takes from, "
            f"at least one. This one is {mixing}."
        )
    if not (tensor.is_floating_point() or tensor.is_complex()) and any(
        list(weights.values()) != [1.0] for weights in mixing.values()
    ):
        raise ValueError(
            f"A tensor of {tensor.dtype} cannot be mixed, only handed on: let every rank take from one, with weight 1, "
            f"or convert the tensor to a floating-point type. The mixing is {mixing}."
        )


def mixed(values: Mapping[int, torch.Tensor], weights: Mapping[int, float]) -> torch.Tensor:
    """`algorithms.mixing.mix`; but what is taken whole from one rank is that value itself, so integers can be."""
    ((source, weight), *others) = weights.items()
    return values[source] if weight == 1.0 and not others else mix(values, weights)


def takers(mixing: Mapping[int, Mapping[int, float]], rank: int) -> list[int]:
    """The other ranks that take from `rank`, in ascending order."""
    return sorted(receivers(mixing, rank))  # type: ignore[arg-type]  # it only reads, so any mapping will do
