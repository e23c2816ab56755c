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
from contextlib import ExitStack, contextmanager

import torch

from syncline.comms.collective import Collective
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.errors import ConfigError
from syncline.layouts.gradient_rounds import GradientRounds
from syncline.layouts.optimizer_shards import OptimizerShards
from syncline.layouts.shards import pieces_of, rounds_of
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.flat import FlatParameters
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
        self._shared_bytes = 0
        self._begun = ExitStack()  # what `close` undoes

    @property
    def recovery(self) -> Recovery:
        return "merge"

    def begin(self) -> None:
        """Move the parameters of rank 0 into shared memory, and the optimizers onto pieces of them."""
        replica, collective = self.replica, self.replica.collective
        for buffer in replica.model.buffers():
            collective.broadcast_(buffer.detach())
        numel, dtype, size = self._flat.numel, self._flat.dtype, collective.size
        longest = max(round.whole.high - round.whole.low for round in self._rounds)
        memory, gradients = self._allocate(numel, dtype), self._allocate(numel, dtype)
        staging = self._allocate(2 * size * longest, dtype).view(2, size, longest)
        self._journal = self._allocate(2 * size, torch.int64).view(-1, 2).numpy()
        self._norms = self._allocate(size, torch.float64)
        self._journal[collective.rank] = (self._step, 0)
        if collective.rank == 0:
            self._flat.read(memory)
        parameters = self._flat.parameters
        sizes = [p.numel() for p in parameters]
        pieces = [pieces_of(sizes, self._rounds, rank, size) for rank in range(size)]
        self._optimizer = OptimizerShards(
            replica.optimizer, parameters, memory, gradients, pieces, rank=collective.rank, allocate=self._allocate
        )
        self._begun.callback(self._optimizer.leave)
        collective.barrier()
        self._optimizer.confirm()
        self._flat.move_to(memory)
        self._gradients = GradientRounds(parameters, self._rounds, gradients, staging, collective)
        self._begun.callback(self._gradients.close)
        replica.log.count_bytes(lambda: self._gradients.bytes_sent)

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

    def before_backward(self, weight: float) -> None:
        """Sum gradients from now on as they become complete."""
        self._gradients.begin_last_pass(weight)

    def before_update(self, weight: float) -> bool:
        """Sum what is left, clip, and commit: from the last barrier on, the step counts."""
        collective = self.replica.collective
        self._gradients.finish(weight)
        self._optimizer.begin_update(self._step + 1)
        if self.replica.clip_norm is not None:
            squares = [torch.linalg.vector_norm(own, dtype=torch.float64).square() for own in self._gradients.owned]
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
            torch._foreach_mul_(self._gradients.owned, factor)

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
        self._begun.close()
