"""The exchange of all layouts in which several workers hold a replica together.

The parameters of a replica lie in memory that all of its workers map, once for all of them: a forward pass reads them
where they are. Each lane (`grid.py`) computes the gradients of its part of the model; with several shares it sums them
in rounds of a few megabytes (`shards.py`), from the last layer to the first, and each worker keeps the part that it
owns. Then each updates the numbers that it owns. So a worker has its part of parameters, gradients and optimizer state,
and the gradients of the layers that a round is waiting for. The result is that of an all-reduce:
g = sum_k (n_k / N) g_k, applied once to every number of every replica.

A step is committed when all workers have summed all rounds. If a worker dies before, nothing has changed, and the step
is repeated. If one dies after, its gradients and its part of the parameters are in the shared memory: a survivor
completes its update (`optimizer_shards.py`). A spare worker (`grid.py`) only takes part in what all agree on.

torch's FSDP2 gathers parameters before each layer, and was seen at seven times the step of DDP on gloo; where memory is
shared, there is nothing to gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from syncline.comms.collective import Collective
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.errors import ConfigError
from syncline.layouts.buffer_board import BufferBoard
from syncline.layouts.commit_journal import CommitJournal
from syncline.layouts.divided_model import TensorSplit
from syncline.layouts.gradient_rounds import GradientRounds
from syncline.layouts.groups import Groups, groups_of
from syncline.layouts.optimizer_shards import OptimizerShards
from syncline.layouts.shards import pieces_by_rank, rounds_of, sizes_of
from syncline.layouts.slice_gradients import SliceGradients
from syncline.layouts.spread import ModelSpread
from syncline.layouts.tied import TiedGradients
from syncline.strategies.exchange import REQUESTS, LocalExchange, Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.method import Method, Recovery
from syncline.telemetry.events import HeldPart

if TYPE_CHECKING:
    from syncline.layouts.layout import Layout

_ROUND_NUMBERS = 512 * 1024
"""How many numbers are summed at a time."""


class SharedModelExchange(LocalExchange):
    """An `Exchange`: sum gradients round by round, update one's own part of the shared parameters."""

    def __init__(self, replica: Replica, method: Method, layout: Layout, spread: ModelSpread) -> None:
        super().__init__(replica, method)
        self._layout, self._spread, self._grid, self._cell = layout, spread, spread.grid, spread.cell
        self._flat = FlatParameters(replica.gradients.parameters, what=f"--layout {layout}")
        self._lanes = spread.lanes(self._flat.parameters)
        self._step = replica.step
        self._shared_bytes = 0
        self._board: BufferBoard | None = None
        self._begun = ExitStack()  # what `close` undoes

    @property
    def recovery(self) -> Recovery:
        return "merge"

    def begin(self) -> None:
        """Move the parameters of rank 0 into shared memory, and the optimizers onto pieces of them."""
        replica, collective = self.replica, self.replica.collective
        self._inside, self._lane, self._team = self._begin_groups()
        for each in {id(g): g for g in (self._inside, self._lane, self._team) if g is not collective}.values():
            replica.log.count_bytes(lambda each=each: each.bytes_sent)  # type: ignore[misc]  # bound now
        if self._cell is not None:
            self._hold()
        if self._grid.workers < collective.size:
            collective.barrier()

    def _begin_groups(self) -> Groups:
        """This worker's groups; those that put their parameters into shared memory have what rank 0 has."""
        replica, collective = self.replica, self.replica.collective
        given = replica.model.parameters() if self._grid.replicas > 1 else ()  # otherwise rank 0 puts its own there
        for tensor in (*given, *replica.model.buffers()):
            collective.broadcast_(tensor.detach())
        return groups_of(collective, self._grid)

    def _hold(self) -> None:
        """Put this worker's replica into memory that its workers share."""
        replica, spread = self.replica, self._spread
        assert self._cell is not None, "a spare worker holds nothing"
        numel, dtype, size = self._flat.numel, self._flat.dtype, self._inside.size
        memory, gradients = self._allocate(numel, dtype), self._allocate(numel, dtype)
        self._memory = memory, gradients
        rows = self._allocate(CommitJournal.numbers_needed(size), torch.int64)
        self._journal = CommitJournal(rows, self._inside.rank, self._step)
        self._norms = self._allocate(size, torch.float64)
        if self._inside.rank == 0:
            self._flat.read(memory)
        self._make_optimizer()
        self._begun.callback(lambda: self._optimizer.leave())
        self._inside.barrier()
        self._optimizer.confirm()
        self._flat.move_to(memory)
        self._gradients = self._open_rounds(memory, gradients)
        self._begun.callback(self._gradients.close)
        replica.log.count_bytes(lambda: self._gradients.bytes_sent)
        self._divide_layers()
        self._tied = TiedGradients(spread.staged, self._flat.parameters, self._cell.stage, self._team)
        self._open_stages()

    def _make_optimizer(self) -> None:
        """Divide the optimizer among the workers of the replica, which all hold the same state of it."""
        self._optimizer = OptimizerShards(
            self.replica.optimizer,
            self._flat.parameters,
            *self._memory,
            pieces_by_rank(self._lanes, self._grid.shards, _ROUND_NUMBERS),
            rank=self._inside.rank,
            allocate=self._allocate,
        )

    def _open_rounds(self, memory: torch.Tensor, gradients: torch.Tensor) -> GradientRounds:
        """The sums of this worker's lane, which lie in `gradients` after those of the lanes before it."""
        assert self._cell is not None, "a spare worker sums nothing"
        number = self._cell.stage * self._grid.slices + self._cell.slice
        leaves = self._lanes[number]
        first = sum(sum(sizes_of(lane)) for lane in self._lanes[:number])
        rounds = rounds_of(sizes_of(leaves), _ROUND_NUMBERS)
        staging, lanes = None, self._lane.size
        if lanes > 1:
            longest = max((round.whole.high - round.whole.low for round in rounds), default=1)
            self._shared_bytes += 2 * lanes * longest * self._flat.dtype.itemsize
            staging = self._lane.allocate_shared(2 * lanes * longest, self._flat.dtype).view(2, lanes, longest)
        parameters = [self._flat.parameters[leaf.parameter] for leaf in leaves]
        if self._spread.split is not None:
            self._slices = SliceGradients(leaves, self._flat.parameters, memory)
            parameters = self._slices.parameters
        return GradientRounds(
            parameters,
            rounds,
            gradients[first : first + sum(sizes_of(leaves))],
            staging,
            self._lane,
            shard=self._cell.shard,
            shards=self._grid.shards,
        )

    def _divide_layers(self) -> None:
        """Compute large layers together with the other slices of this stage."""
        spread, grid, cell = self._spread, self._grid, self._cell
        self._divided: TensorSplit | None = None
        if spread.split is None or cell is None:
            return
        peers = self._team if grid.stages == 1 else self._team.split(cell.stage)
        divided = TensorSplit(self.replica.model, peers, parameters=self._flat.parameters, split=spread.split)
        self._divided = divided
        self._begun.callback(divided.close)
        self.replica.log.count_bytes(lambda: divided.bytes_sent)

    def _open_stages(self) -> None:
        spread, cell = self._spread, self._cell
        if spread.staged is None:
            return
        spread.open(self._team)
        assert spread.runner is not None, "opened just now"
        assert cell is not None, "a spare worker has no stage"
        self.replica.log.count_bytes(lambda: spread.runner.bytes_sent if spread.runner is not None else 0)
        own = list(spread.runner.stage.buffers()) if cell.shard == 0 and cell.slice == 0 else []
        self._board = BufferBoard(list(self.replica.model.buffers()), own, self._allocate)
        self._board.publish(self._step, everything=True)

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._shared_bytes += numel * dtype.itemsize
        try:
            return self._inside.allocate_shared(numel, dtype)
        except SharedMemoryFull as error:
            raise ConfigError(
                f"--layout {self._layout} keeps the model in shared memory, and there is not enough: {error}. Raise "
                "--shared-memory-limit-mb, or use --layout replicated.",
                code="layout", layout=str(self._layout), reason="shared-memory", nearest="replicated",
            ) from error  # fmt: skip

    def bytes_inside(self) -> int:
        """What this worker has sent to others of its replica. Sums over several replicas count as between them."""
        if self._cell is None:
            return 0
        runner, divided = self._spread.runner, self._divided
        activations = (runner.bytes_sent if runner is not None else 0) + (divided.bytes_sent if divided else 0)
        return activations + (self._gradients.bytes_sent if self._grid.replicas == 1 else 0)

    def held_part(self, optimizer_state: float) -> HeldPart | None:
        """What this worker holds; the optimizer's state is so many times as large as the parameters."""
        cell, spread = self._cell, self._spread
        if cell is None:
            return None
        pieces = pieces_by_rank(self._lanes, self._grid.shards, _ROUND_NUMBERS)[self._inside.rank]
        own = sum(piece.high - piece.low for piece in pieces) * self._flat.dtype.itemsize
        whole = self._flat.numel * self._flat.dtype.itemsize
        return HeldPart(
            replica=cell.replica,
            shard=cell.shard,
            stage=cell.stage,
            slice=cell.slice,
            layers=spread.staged.names(cell.stage) if spread.staged is not None else "",
            parameters=own,
            state=round(own * (2 + optimizer_state)),
            whole=round(whole * (2 + optimizer_state)),
        )

    def bytes_of_others(self) -> int:
        """How much of the shared memory is not this worker's part of it."""
        size = self._grid.per_replica
        activations = self._divided.shared_bytes if self._cell is not None and self._divided is not None else 0
        return (self._shared_bytes + activations) * (size - 1) // size

    def before_backward(self, weight: float) -> None:
        """Sum gradients from now on as they become complete."""
        if self._cell is not None and self._grid.per_team == 1:
            self._gradients.begin_last_pass(weight)

    def before_update(self, weight: float) -> bool:
        """Sum what is left, clip, and commit: from the last barrier on, the step counts."""
        collective, clip_norm = self.replica.collective, self.replica.clip_norm
        if self._cell is not None:
            self._sum_gradients(weight)
        self._agree(weight)
        if self._cell is not None and clip_norm is not None:
            self._clip(clip_norm)
        # A barrier that all have reached is complete for all of them: from here on the step counts, even if some die.
        collective.barrier()
        self.replica.log.exchanged()
        return True

    def _sum_gradients(self, weight: float) -> None:
        """Sum what is left, and publish what others need of it; nothing of the model changes."""
        self._tied.gather()
        if self._divided is not None:
            self._slices.take(self._divided)
        self._gradients.finish(weight)
        self._optimizer.begin_update(self._step + 1)
        if self._board is not None:
            self._board.publish(self._step + 1)
        if self.replica.clip_norm is not None:
            squares = [torch.linalg.vector_norm(own, dtype=torch.float64).square() for own in self._gradients.owned]
            self._norms[self._inside.rank] = torch.stack(squares).sum() if squares else 0.0

    def _agree(self, weight: float) -> None:
        """Sum the piggybacked values: one worker of each team knows the loss; any may have a request."""
        piggybacked = self.replica.gradients.piggybacked
        piggybacked[: REQUESTS.start].mul_(weight if self._grid.of_loss(self.replica.collective.rank) else 0.0)
        self.replica.collective.all_reduce_(piggybacked)

    def _clip(self, norm: float, *, scale: float = 1.0) -> None:
        """As torch's function, over what all workers own. Their norms are known since the last sum.

        Gradients were divided by `scale` since then.

        Before the step counts: who completes another's update finds its gradients clipped.
        """
        factor = norm / (float(self._norms.sum().sqrt()) / scale + 1e-6)
        if factor < 1.0 and self._gradients.owned:
            torch._foreach_mul_(self._gradients.owned, factor)

    def update(self) -> None:
        if self._cell is not None:
            self._journal.note(self._step + 1, updates=True)
            self._optimizer.update()

    def after_update(self, weight: float) -> bool:
        del weight
        if self._cell is not None:
            self._journal.note(self._step + 1, updates=self._journal.own_step > self._step)
        self._step += 1
        return False

    def before_forward(self) -> None:
        """Wait until all workers of the replica have updated their parts."""
        if self._cell is not None:
            self._inside.barrier()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers hold the whole model, and their optimizers its whole state, while none of them updates."""
        collective = self.replica.collective
        collective.barrier()
        if self._board is not None:
            self._board.read(self._step)
        if self._grid.workers < collective.size:  # spare workers have no part in a replica's memory, but evaluate, too
            for tensor in (*self.replica.model.parameters(), *self.replica.model.buffers()):
                collective.broadcast_(tensor.detach())
        with ExitStack() as whole:
            if self._cell is not None:
                whole.enter_context(self._optimizer.whole())
            if self._cell is not None and self._divided is not None:
                whole.enter_context(self._divided.undivided())
            yield
        collective.barrier()

    def committed_steps(self) -> dict[int, int] | None:
        """All workers, dead ones included, have done the steps that any of them has committed to."""
        step = self._journal.last_step
        if not self._optimizer.is_recoverable and step > self.replica.step:
            return None
        return dict.fromkeys(range(self._grid.shares), step)

    def merge(self, survivors: Collective) -> None:
        """Complete the updates of those that died in one. Survivors have completed theirs.

        In each replica its first survivor does so; a replica of which none is left is not needed.
        """
        assert self._cell is not None, "a spare worker does not survive: it holds nothing"
        replicas = [int(data) for data in survivors.all_gather(b"%d" % self._cell.replica)]
        step, is_first = self._journal.last_step, replicas.index(self._cell.replica) == survivors.rank
        if is_first and step > self.replica.step and self._journal.is_update:
            for rank in self._optimizer.ranks_to_complete(step):
                self._optimizer.complete(rank)
        if self._board is not None:
            self._board.read(step)
        survivors.barrier()

    def close(self) -> None:
        """Parameters and optimizer are whole again, in the memory of this View, until the next one moves them."""
        self._begun.close()
        self._spread.runner = None
