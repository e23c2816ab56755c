"""What a worker holds of a replica that several workers hold together, for as long as a View lasts.

Here: `HeldReplica`: parameters, gradients and optimizer state in memory that the replica's workers map, and this
worker's part of them: rounds of sums, pieces of the optimizer, its stage of a pipeline, its slices of layers. Not here:
what is done with them in a step (`shared_model.py`), and who owns what (`shards.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.errors import ConfigError
from syncline.layouts.buffer_board import BufferBoard
from syncline.layouts.commit_journal import CommitJournal
from syncline.layouts.divided_model import TensorSplit
from syncline.layouts.gradient_rounds import GradientRounds
from syncline.layouts.grid import Cell
from syncline.layouts.groups import Groups
from syncline.layouts.optimizer_shards import OptimizerShards
from syncline.layouts.shards import pieces_by_rank, rounds_of, sizes_of
from syncline.layouts.slice_gradients import SliceGradients
from syncline.layouts.spread import ModelSpread
from syncline.layouts.tied import TiedGradients
from syncline.strategies.exchange import Replica
from syncline.strategies.flat import FlatParameters
from syncline.telemetry.events import HeldPart

if TYPE_CHECKING:
    from syncline.layouts.layout import Layout

_ROUND_NUMBERS = 512 * 1024
"""How many numbers are summed at a time."""


class HeldReplica:
    """This worker's `replica`, moved into memory that its workers share; all of them make theirs together."""

    def __init__(
        self,
        replica: Replica,
        layout: Layout,
        spread: ModelSpread,
        flat: FlatParameters,
        groups: Groups,
        undo: ExitStack,
    ) -> None:
        assert spread.cell is not None, "a spare worker holds nothing"
        self.cell: Cell = spread.cell
        self.replica, self.spread, self.grid, self.flat = replica, spread, spread.grid, flat
        self.lanes = spread.lanes(flat.parameters)
        self.inside, self._lane, self._team = groups
        self._layout, self._undo = layout, undo
        self._shared_bytes = 0
        self.memory, self.gradients = (self.allocate(flat.numel, flat.dtype) for _ in range(2))
        rows = self.allocate(CommitJournal.numbers_needed(self.inside.size), torch.int64)
        self.journal = CommitJournal(rows, self.inside.rank, replica.step)
        self.norms = self.allocate(self.inside.size, torch.float64)
        if self.inside.rank == 0:
            flat.read(self.memory)
        self.divide_optimizer()
        undo.callback(lambda: self.optimizer.leave())  # whichever it has then
        self.inside.barrier()
        self.optimizer.confirm()
        flat.move_to(self.memory)
        self.rounds = self._open_rounds()
        undo.callback(self.rounds.close)
        replica.log.count_bytes(lambda: self.rounds.bytes_sent)
        self.divided = self._divide_layers()
        self.tied = TiedGradients(spread.staged, flat.parameters, self.cell.stage, self._team)
        self.board = self._open_stages()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros that all workers of the replica share; all of them call this together."""
        self._shared_bytes += numel * dtype.itemsize
        try:
            return self.inside.allocate_shared(numel, dtype)
        except SharedMemoryFull as error:
            raise ConfigError(
                f"--layout {self._layout} keeps the model in shared memory, and there is not enough: {error}. Raise "
                "--shared-memory-limit-mb, or use --layout replicated.",
                code="layout", layout=str(self._layout), reason="shared-memory", nearest="replicated",
            ) from error  # fmt: skip

    def divide_optimizer(self) -> None:
        """Divide the optimizer among the workers of the replica, which all hold the same state of it."""
        self.optimizer = OptimizerShards(
            self.replica.optimizer,
            self.flat.parameters,
            self.memory,
            self.gradients,
            pieces_by_rank(self.lanes, self.grid.shards, _ROUND_NUMBERS),
            rank=self.inside.rank,
            allocate=self.allocate,
        )

    def _open_rounds(self) -> GradientRounds:
        """The sums of this worker's lane, which lie in `gradients` after those of the lanes before it."""
        cell, flat = self.cell, self.flat
        number = cell.stage * self.grid.slices + cell.slice
        leaves = self.lanes[number]
        first = sum(sum(sizes_of(lane)) for lane in self.lanes[:number])
        rounds = rounds_of(sizes_of(leaves), _ROUND_NUMBERS)
        staging, lanes = None, self._lane.size
        if lanes > 1:
            longest = max((round.whole.high - round.whole.low for round in rounds), default=1)
            self._shared_bytes += 2 * lanes * longest * flat.dtype.itemsize
            staging = self._lane.allocate_shared(2 * lanes * longest, flat.dtype).view(2, lanes, longest)
        parameters = [flat.parameters[leaf.parameter] for leaf in leaves]
        if self.spread.split is not None:
            self.slices = SliceGradients(leaves, flat.parameters, self.memory)
            parameters = self.slices.parameters
        return GradientRounds(
            parameters,
            rounds,
            self.gradients[first : first + sum(sizes_of(leaves))],
            staging,
            self._lane,
            shard=cell.shard,
            shards=self.grid.shards,
        )

    def _divide_layers(self) -> TensorSplit | None:
        """Compute large layers together with the other slices of this stage."""
        spread, grid = self.spread, self.grid
        if spread.split is None:
            return None
        peers = self._team if grid.stages == 1 else self._team.split(self.cell.stage)
        divided = TensorSplit(self.replica.model, peers, parameters=self.flat.parameters, split=spread.split)
        self._undo.callback(divided.close)
        self.replica.log.count_bytes(lambda: divided.bytes_sent)
        return divided

    def _open_stages(self) -> BufferBoard | None:
        spread, cell, replica = self.spread, self.cell, self.replica
        if spread.staged is None:
            return None
        spread.open(self._team)
        assert spread.runner is not None, "opened just now"
        replica.log.count_bytes(lambda: spread.runner.bytes_sent if spread.runner is not None else 0)
        own = list(spread.runner.stage.buffers()) if cell.shard == 0 and cell.slice == 0 else []
        board = BufferBoard(list(replica.model.buffers()), own, self.allocate)
        board.publish(replica.step, everything=True)
        return board

    def sum_gradients(self, weight: float, step: int) -> None:
        """Sum what is left, and publish what others need for update `step`; nothing of the model changes."""
        self.tied.gather()
        if self.divided is not None:
            self.slices.take(self.divided)
        self.rounds.finish(weight)
        self.optimizer.begin_update(step)
        if self.board is not None:
            self.board.publish(step)
        if self.replica.clip_norm is not None:
            squares = [torch.linalg.vector_norm(own, dtype=torch.float64).square() for own in self.rounds.owned]
            self.norms[self.inside.rank] = torch.stack(squares).sum() if squares else 0.0

    def clip(self, norm: float, *, scale: float = 1.0) -> None:
        """As torch's function, over what all workers own. Their norms are known since the last sum.

        Gradients were divided by `scale` since then.

        Before the step counts: who completes another's update finds its gradients clipped.
        """
        factor = norm / (float(self.norms.sum().sqrt()) / scale + 1e-6)
        if factor < 1.0 and self.rounds.owned:
            torch._foreach_mul_(self.rounds.owned, factor)

    # What the report shows.

    def bytes_inside(self) -> int:
        """What this worker has sent to others of its replica. Sums over several replicas count as between them."""
        runner, divided = self.spread.runner, self.divided
        activations = (runner.bytes_sent if runner is not None else 0) + (divided.bytes_sent if divided else 0)
        return activations + (self.rounds.bytes_sent if self.grid.replicas == 1 else 0)

    def part(self, optimizer_state: float) -> HeldPart:
        """What this worker holds; the optimizer's state is so many times as large as the parameters."""
        cell, staged = self.cell, self.spread.staged
        pieces = pieces_by_rank(self.lanes, self.grid.shards, _ROUND_NUMBERS)[self.inside.rank]
        own = sum(piece.high - piece.low for piece in pieces) * self.flat.dtype.itemsize
        whole = self.flat.numel * self.flat.dtype.itemsize
        return HeldPart(
            replica=cell.replica,
            shard=cell.shard,
            stage=cell.stage,
            slice=cell.slice,
            layers=staged.names(cell.stage) if staged is not None else "",
            parameters=own,
            state=round(own * (2 + optimizer_state)),
            whole=round(whole * (2 + optimizer_state)),
        )

    def bytes_of_others(self) -> int:
        """How much of the shared memory is not this worker's part of it."""
        size = self.grid.per_replica
        activations = self.divided.shared_bytes if self.divided is not None else 0
        return (self._shared_bytes + activations) * (size - 1) // size
