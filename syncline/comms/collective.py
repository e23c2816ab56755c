"""The collective operations of the workers of one View.

Here: the `Collective` protocol and `Solo`, its one-worker implementation, which also shows that the protocol is
sufficient. Not here: the implementations for many workers (`shared_memory.py`, `process_group.py`), membership
(coordinator), and what is exchanged when (strategies).

Every rank calls all methods except `abort` in the same order with the same shapes. A call that cannot be completed
raises `PeerFailed`, and leaves its tensor undefined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from syncline.comms.mixing import mix, receivers
from syncline.errors import PeerFailed


class Collective(Protocol):
    """One rank's end of the communication between the workers of a View."""

    @property
    def rank(self) -> int:
        """This worker's place, from 0 to `size` - 1."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank has contributed to exchanges so far.

        Contributions to all ranks count once; those of `mix_` count for each rank that takes them.
        """

    @property
    def waited_s(self) -> float:
        """How long this rank has waited for others so far; 0 where waiting cannot be separated from sending."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor that `all_reduce_` and `mix_` use in place, without a copy, where the transport can."""

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """One zeroed flat CPU tensor that all ranks map: what one writes, the others read. No copies, no locks.

        `ConfigError` where the workers share no memory.
        """

    def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Replace `tensor` by the sum over all ranks of `weight * tensor`: the same bits on every rank.

        Each rank passes its own weight, so a weighted mean over unequal shares costs no extra pass.
        """

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Replace `tensor` by the sum over the ranks j that this rank takes from of `mixing[rank][j]` * (j's tensor).

        All ranks do so at the same time, from the values before, with the same mixing (`mixing.py`). The sum is that of
        `mixing.mix`, so float32 and float64 have the same bits with every transport. Integer tensors can only be passed
        on unchanged: every rank takes from one rank, with weight 1.
        """

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with what it holds on rank `source`."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def hosts(self) -> list[int]:
        """Each rank's host, as a number: hosts are counted from 0 in the order of the ranks."""

    def split(self, color: int) -> Collective:
        """A collective of the ranks that pass the same color, in the same order, which counts its bytes from 0.

        Aborting or closing this collective does so with those split from it, but not the reverse.
        """

    def abort(self) -> None:
        """Make calls in progress and later calls raise `PeerFailed`. Safe from any thread, at any time."""

    def close(self) -> None:
        """Release this rank's resources; needs no other rank."""


class Solo:
    """A single worker: every exchange is the identity, up to the weight."""

    rank = 0
    size = 1
    bytes_sent = 0
    waited_s = 0.0

    def __init__(self) -> None:
        self._aborted = False
        self._children: list[Solo] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._check()
        return torch.zeros(numel, dtype=dtype)

    def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        self._check()
        if weight != 1.0:
            tensor.detach().mul_(weight)

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        self._check()
        check_mixing(tensor, mixing, self.size)
        data = tensor.detach()
        data.copy_(mixed({0: data}, mixing[0]))

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        del tensor, source
        self._check()

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._check()
        return [payload]

    def barrier(self) -> None:
        self._check()

    def hosts(self) -> list[int]:
        return [0]

    def split(self, color: int) -> Collective:
        del color
        self._check()
        child = Solo()
        self._children.append(child)
        return child

    def abort(self) -> None:
        self._aborted = True
        for child in self._children:
            child.abort()

    def close(self) -> None: ...

    def _check(self) -> None:
        if self._aborted:
            raise PeerFailed("The run was aborted.", code="aborted")


def check_mixing(tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]], size: int) -> None:
    """`ValueError` unless `mixing` fits `size` ranks and `tensor`; on all ranks alike, so that none waits."""
    ranks = set(range(size))
    wrong = [rank for rank, weights in mixing.items() if not weights or not ranks.issuperset(weights)]
    if set(mixing) != ranks or wrong:
        raise ValueError(
            f"A mixing of {size} workers gives each of the ranks 0 to {size - 1} at least one of them to take from, "
            f"but this one is {mixing}."
        )
    if not (tensor.is_floating_point() or tensor.is_complex()) and any(
        list(weights.values()) != [1.0] for weights in mixing.values()
    ):
        raise ValueError(
            f"A tensor of {tensor.dtype} cannot be mixed, only passed on: let every rank take from one rank with "
            f"weight 1, or convert the tensor to a floating-point type. The mixing is {mixing}."
        )


def mixed(values: Mapping[int, torch.Tensor], weights: Mapping[int, float]) -> torch.Tensor:
    """`mixing.mix`; but a value taken from a single rank with weight 1 is returned as it is, so integers work."""
    ((source, weight), *others) = weights.items()
    return values[source] if weight == 1.0 and not others else mix(values, weights)


def takers(mixing: Mapping[int, Mapping[int, float]], rank: int) -> list[int]:
    """The other ranks that take from `rank`, in ascending order."""
    return sorted(receivers(mixing, rank))  # type: ignore[arg-type]  # it only reads, so any mapping will do
