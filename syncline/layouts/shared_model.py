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

from syncline.comms.collective import Collective
from syncline.layouts.groups import Groups, groups_of
from syncline.layouts.held_replica import HeldReplica
from syncline.layouts.spread import ModelSpread
from syncline.strategies.exchange import REQUESTS, LocalExchange, Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.method import Method, Recovery
from syncline.telemetry.events import HeldPart

if TYPE_CHECKING:
    from syncline.layouts.layout import Layout


class SharedModelExchange(LocalExchange):
    """An `Exchange`: sum gradients round by round, update one's own part of the shared parameters."""

    def __init__(self, replica: Replica, method: Method, layout: Layout, spread: ModelSpread) -> None:
        super().__init__(replica, method)
        self._layout, self._spread, self._grid, self._cell = layout, spread, spread.grid, spread.cell
        self._flat = FlatParameters(replica.gradients.parameters, what=f"--layout {layout}")
        self._held: HeldReplica | None = None
        """None before the first step, and always on a spare worker."""
        self._step = replica.step
        self._begun = ExitStack()  # what `close` undoes

    @property
    def recovery(self) -> Recovery:
        return "merge"

    def begin(self) -> None:
        """Move the parameters of rank 0 into shared memory, and the optimizers onto pieces of them."""
        replica, collective = self.replica, self.replica.collective
        groups = self._begin_groups()
        for each in {id(g): g for g in groups if g is not collective}.values():
            replica.log.count_bytes(lambda each=each: each.bytes_sent)  # type: ignore[misc]  # bound now
        if self._cell is not None:
            self._held = self._hold(groups)
        if self._grid.workers < collective.size:
            collective.barrier()

    def _begin_groups(self) -> Groups:
        """This worker's groups; those that put their parameters into shared memory have what rank 0 has."""
        replica, collective = self.replica, self.replica.collective
        given = replica.model.parameters() if self._grid.replicas > 1 else ()  # otherwise rank 0 puts its own there
        for tensor in (*given, *replica.model.buffers()):
            collective.broadcast_(tensor.detach())
        return groups_of(collective, self._grid)

    def _hold(self, groups: Groups) -> HeldReplica:
        """Put this worker's replica into memory that its workers share."""
        return HeldReplica(self.replica, self._layout, self._spread, self._flat, groups, self._begun)

    def bytes_inside(self) -> int:
        """What this worker has sent to others of its replica."""
        return self._held.bytes_inside() if self._held is not None else 0

    def held_part(self, optimizer_state: float) -> HeldPart | None:
        """What this worker holds; the optimizer's state is so many times as large as the parameters."""
        return self._held.part(optimizer_state) if self._held is not None else None

    def bytes_of_others(self) -> int:
        """How much of the shared memory is not this worker's part of it."""
        return self._held.bytes_of_others() if self._held is not None else 0

    def before_backward(self, weight: float) -> None:
        """Sum gradients from now on as they become complete."""
        if self._held is not None and self._grid.per_team == 1:
            self._held.rounds.begin_last_pass(weight)

    def before_update(self, weight: float) -> bool:
        """Sum what is left, clip, and commit: from the last barrier on, the step counts."""
        collective, clip_norm = self.replica.collective, self.replica.clip_norm
        if self._held is not None:
            self._held.sum_gradients(weight, self._step + 1)
        self._agree(weight)
        if self._held is not None and clip_norm is not None:
            self._held.clip(clip_norm)
        # A barrier that all have reached is complete for all of them: from here on the step counts, even if some die.
        collective.barrier()
        self.replica.log.exchanged()
        return True

    def _agree(self, weight: float) -> None:
        """Sum the piggybacked values: one worker of each team knows the loss; any may have a request."""
        piggybacked = self.replica.gradients.piggybacked
        piggybacked[: REQUESTS.start].mul_(weight if self._grid.of_loss(self.replica.collective.rank) else 0.0)
        self.replica.collective.all_reduce_(piggybacked)

    def update(self) -> None:
        if self._held is not None:
            self._held.journal.note(self._step + 1, updates=True)
            self._held.optimizer.update()

    def after_update(self, weight: float) -> bool:
        del weight
        if self._held is not None:
            journal = self._held.journal
            journal.note(self._step + 1, updates=journal.own_step > self._step)
        self._step += 1
        return False

    def before_forward(self) -> None:
        """Wait until all workers of the replica have updated their parts."""
        if self._held is not None:
            self._held.inside.barrier()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers hold the whole model, and their optimizers its whole state, while none of them updates."""
        collective, held = self.replica.collective, self._held
        collective.barrier()
        if held is not None and held.board is not None:
            held.board.read(self._step)
        if self._grid.workers < collective.size:  # spare workers have no part in a replica's memory, but evaluate, too
            for tensor in (*self.replica.model.parameters(), *self.replica.model.buffers()):
                collective.broadcast_(tensor.detach())
        with ExitStack() as whole:
            if held is not None:
                whole.enter_context(held.optimizer.whole())
            if held is not None and held.divided is not None:
                whole.enter_context(held.divided.undivided())
            yield
        collective.barrier()

    def committed_steps(self) -> dict[int, int] | None:
        """All workers, dead ones included, have done the steps that any of them has committed to."""
        held = self._holding()
        step = held.journal.last_step
        if not held.optimizer.is_recoverable and step > self.replica.step:
            return None
        return dict.fromkeys(range(self._grid.shares), step)

    def merge(self, survivors: Collective) -> None:
        """Complete the updates of those that died in one. Survivors have completed theirs.

        In each replica its first survivor does so; a replica of which none is left is not needed.
        """
        held = self._holding()
        replicas = [int(data) for data in survivors.all_gather(b"%d" % held.cell.replica)]
        step, is_first = held.journal.last_step, replicas.index(held.cell.replica) == survivors.rank
        if is_first and step > self.replica.step and held.journal.is_update:
            for rank in held.optimizer.ranks_to_complete(step):
                held.optimizer.complete(rank)
        if held.board is not None:
            held.board.read(step)
        survivors.barrier()

    def _holding(self) -> HeldReplica:
        assert self._held is not None, "a spare worker does not survive: it holds nothing"
        return self._held

    def close(self) -> None:
        """Parameters and optimizer are whole again, in the memory of this View, until the next one moves them."""
        self._begun.close()
        self._spread.runner = None
