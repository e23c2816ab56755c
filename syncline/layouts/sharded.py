"""`sharded`: all workers of a host hold one model together.

Parameters lie in memory that all workers map, once for all of them: a forward pass reads them where they are. In a
backward pass, gradients are summed in rounds of a few megabytes (`shards.py`), from the last layer to the first; each
worker sums its part of a round, and keeps only that. Then each updates the numbers that it owns. So each worker has 1/n
of parameters, gradients and optimizer state, and the gradients of the layers that a round is waiting for. The result is
that of an all-reduce: g = sum_k (n_k / N) g_k, applied once to every number.

A step is committed when all workers have summed all rounds. If a worker dies before, nothing has changed, and the step
is repeated. If one dies after, its gradients and its part of the parameters are in the shared memory: a survivor
completes its update (`optimizer_shards.py`).

torch's FSDP2 gathers parameters before each layer, and was seen at seven times the step of DDP on gloo; where memory is
shared, there is nothing to gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.errors import ConfigError
from syncline.layouts.optimizer_shards import OptimizerShards
from syncline.layouts.shards import Range, pieces_of, rounds_of
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.flat import FlatParameters, dense_strides
from syncline.strategies.method import Method, Recovery

_ROUND_NUMBERS = 512 * 1024
"""How many numbers are summed at a time."""
_STEP, _UPDATES = 0, 1
"""Columns of the journal: the step that a worker has committed to, and whether it updates in it."""


class ShardedExchange(LocalExchange):
    """An `Exchange`: sum gradients round by round, update one's own part of the shared parameters."""

    def __init__(self, replica: Replica, method: Method) -> None:
        super().__init__(replica, method)
        self._flat = FlatParameters(replica.gradients.parameters, what="--layout sharded")
        self._rounds = rounds_of([p.numel() for p in self._flat.parameters], _ROUND_NUMBERS)
        self._step = replica.step
        self._weight: float | None = None  # while a backward pass completes gradients
        self._hooks: list[Any] = []
        self._bytes = self._shared_bytes = 0
        replica.log.count_bytes(lambda: self._bytes)

    @property
    def recovery(self) -> Recovery:
        return "merge"

    def begin(self) -> None:
        """Move the parameters of rank 0 into shared memory, and the optimizers onto pieces of them."""
        replica, collective = self.replica, self.replica.collective
        for buffer in replica.model.buffers():
            collective.broadcast_(buffer.detach())
        numel, dtype, size = self._flat.numel, self._flat.dtype, collective.size
        self._longest = max((r.whole.high - r.whole.low for r in self._rounds), default=0)
        self._memory = self._allocate(numel, dtype)
        self._gradients = self._allocate(numel, dtype)
        self._staging = self._allocate(2 * size * self._longest, dtype).view(2, size, self._longest)
        self._journal = self._allocate(2 * size, torch.int64).view(-1, 2).numpy()
        self._norms = self._allocate(size, torch.float64)
        self._journal[collective.rank] = (self._step, 0)
        if collective.rank == 0:
            self._flat.read(self._memory)
        sizes = [p.numel() for p in self._flat.parameters]
        pieces = [pieces_of(sizes, self._rounds, rank, size) for rank in range(size)]
        self._optimizer = OptimizerShards(
            replica.optimizer,
            self._flat.parameters,
            self._memory,
            self._gradients,
            pieces,
            rank=collective.rank,
            allocate=self._allocate,
        )
        self._owned = [self._gradients[slice(*r.owned(collective.rank, size))] for r in self._rounds]
        collective.barrier()
        self._optimizer.confirm()
        self._flat.move_to(self._memory)
        self._watch_gradients()
        self._begin_pass()

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._shared_bytes += numel * dtype.itemsize
        try:
            return self.replica.collective.allocate_shared(numel, dtype)
        except SharedMemoryFull as error:
            raise ConfigError(
                f"--layout sharded keeps the model in shared memory, and there is not enough: {error}. Raise "
                "--shared-memory-limit-mb, or use --layout replicated.",
                code="layout", layout="sharded", reason="shared-memory", nearest="replicated",
            ) from error  # fmt: skip

    def bytes_of_others(self) -> int:
        """How much of the shared memory is not this worker's part of it."""
        size = self.replica.collective.size
        return self._shared_bytes * (size - 1) // size

    # The backward pass

    def _watch_gradients(self) -> None:
        self._rounds_of: dict[nn.Parameter, list[int]] = {p: [] for p in self._flat.parameters}
        for number, round in enumerate(self._rounds):
            for n in round.parameters:
                self._rounds_of[self._flat.parameters[n]].append(number)
        self._places: dict[nn.Parameter, Range] = {}
        start = 0
        for p in self._flat.parameters:
            self._places[p] = Range(start, start + p.numel())
            start += p.numel()
            self._hooks.append(p.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]

    def _begin_pass(self) -> None:
        self._weight, self._next_round = None, 0
        self._missing = [len(r.parameters) for r in self._rounds]

    def before_backward(self, weight: float) -> None:
        """Sum gradients from now on as they become complete."""
        self._weight = weight

    def _on_gradient(self, p: nn.Parameter) -> None:
        if self._weight is None:
            return  # other micro-batches follow, which add to it
        for number in self._rounds_of[p]:
            self._missing[number] -= 1
        while self._next_round < len(self._rounds) and self._missing[self._next_round] <= 0:
            self._sum_round(self._weight)

    def _sum_round(self, weight: float) -> None:
        """Exchange the gradients of the next round, and sum one's own part."""
        collective, number = self.replica.collective, self._next_round
        round, slot = self._rounds[number], self._staging[number % 2]
        low, high = round.whole
        mine = slot[collective.rank]
        for n in round.parameters:
            p = self._flat.parameters[n]
            start, end = self._places[p]
            part = mine[max(start, low) - low : min(end, high) - low]
            if p.grad is None:
                part.zero_()
            else:
                gradient = _in_memory_order(p)[max(start, low) - start : min(end, high) - start]
                torch.mul(gradient, weight, out=part)
                if start >= low:  # rounds go from the end to the beginning: this was its last
                    p.grad = None
        self._next_round += 1
        # A slot is filled again two rounds later: then all have reached the barrier of the next round, after this sum.
        collective.barrier()
        own = round.owned(collective.rank, collective.size)
        summed, theirs = self._owned[number], slot[:, own.low - low : own.high - low]
        torch.add(theirs[0], theirs[1], out=summed)
        for other in theirs[2:]:
            summed.add_(other)
        self._bytes += (high - low) * slot.element_size()

    def before_update(self, weight: float) -> bool:
        """Sum the rounds that are left, with zeros for gradients that this worker has not computed; then commit."""
        collective = self.replica.collective
        while self._next_round < len(self._rounds):
            self._sum_round(weight)
        self._begin_pass()
        self._optimizer.begin_update(self._step + 1)
        if self.replica.clip_norm is not None:
            squares = [torch.linalg.vector_norm(own, dtype=torch.float64).square() for own in self._owned]
            self._norms[collective.rank] = torch.stack(squares).sum()
        collective.all_reduce_(self.replica.gradients.piggybacked, weight)
        if self.replica.clip_norm is not None:
            self._clip(self.replica.clip_norm)
        # A barrier that all have reached is complete for all of them: from here on the step counts, even if some die.
        collective.barrier()
        self.replica.log.exchanged()
        return True

    def _clip(self, norm: float) -> None:
        """As torch's function, over what all workers own. Their norms are known since the last sum.

        Before the step counts: who completes another's update finds its gradients clipped.
        """
        factor = norm / (float(self._norms.sum().sqrt()) + 1e-6)
        if factor < 1.0:
            torch._foreach_mul_(self._owned, factor)

    # The update

    def update(self) -> None:
        self._note(updates=True)
        self._optimizer.update()

    def after_update(self, weight: float) -> bool:
        del weight
        self._note(updates=bool(self._journal[self.replica.collective.rank, _STEP] > self._step))
        self._step += 1
        return False

    def _note(self, *, updates: bool) -> None:
        """Note where all workers see it that the step counts."""
        row = self._journal[self.replica.collective.rank]
        row[_UPDATES] = updates
        row[_STEP] = self._step + 1

    def before_forward(self) -> None:
        """Wait until all have updated their parts."""
        self.replica.collective.barrier()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers hold the whole model, and their optimizers its whole state, while none of them updates."""
        self.replica.collective.barrier()
        with self._optimizer.whole():
            yield
        self.replica.collective.barrier()

    # Failures

    def committed_steps(self) -> dict[int, int] | None:
        """All workers, dead ones included, have done the steps that any of them has committed to."""
        step = int(self._journal[:, _STEP].max())
        if not self._optimizer.is_recoverable and step > self.replica.step:
            return None
        return dict.fromkeys(range(self.replica.collective.size), step)

    def merge(self, survivors: Collective) -> None:
        """Complete the update of those that died in it. Survivors have completed theirs."""
        survivors.barrier()
        step = self._journal[:, _STEP].max()
        is_update = any(row[_STEP] == step and row[_UPDATES] for row in self._journal)
        if survivors.rank == 0 and step > self.replica.step and is_update:
            for rank in self._optimizer.ranks_to_complete(int(step)):
                self._optimizer.complete(rank)
        survivors.barrier()

    def close(self) -> None:
        """Parameters and optimizer are whole again, in the memory of this View, until the next one moves them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if hasattr(self, "_optimizer"):
            self._optimizer.leave()


def _in_memory_order(p: nn.Parameter) -> torch.Tensor:
    """The gradient of `p` as one vector, in the order in which the parameter lies in memory."""
    gradient = p.grad
    assert gradient is not None, "checked before"
    strides = dense_strides(p)
    if gradient.stride() != strides or gradient.is_sparse:
        gradient = torch.empty_strided(p.shape, strides, dtype=p.dtype).copy_(gradient.to_dense())
    return gradient.as_strided((p.numel(),), (1,))
