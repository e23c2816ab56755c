"""A strategy between replicas that are spread over several workers: a replica is one worker of the strategy.

The first worker of each replica, its *leader*, has the strategy's own exchange, unchanged: with the whole model, which
lies in memory that the replica shares, and a collective of the leaders. The other workers of the replica do in each
step what the leader says: the moments of a step are the same for all of them, and when the strategy steps with its
optimizer, all of them update what they own.

What the replica has since the strategy's last exchange is its own. If one of its workers dies, the leader completes the
update in flight, and the replica's steps count as those of a worker that survives. If the leader dies, the replica
fails with it, as a worker does: its steps since the last exchange are repeated, and its other workers take over the
state of another replica, as new workers do.

Here: `ReplicaExchange`. Not here: gradients, parameters and updates inside of a replica (`shared_model.py`), and the
sum of exact gradients over all replicas, which needs no leaders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncline.comms.collective import Collective, Solo
from syncline.errors import PeerFailed
from syncline.layouts.groups import Groups, replica_groups_of
from syncline.layouts.replica_optimizer import ReplicaOptimizer
from syncline.layouts.shared_model import SharedModelExchange
from syncline.layouts.spread import ModelSpread
from syncline.strategies.exchange import REQUESTS, Exchange, Replica
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.method import Method, Recovery
from syncline.strategies.methods.local_sgd import adopt_optimizer

if TYPE_CHECKING:
    from syncline.layouts.layout import Layout

_DONE, _UPDATE, _LOAD = 0.0, 1.0, 2.0
"""What a leader says: the moment is over, update, load the optimizer's state."""
_LIVE = "live"
"""The private state of a strategy as a worker carries it from View to View, without the optimizer that it has."""


class _Lead(NamedTuple):
    """What a leader has beside what all workers have: the strategy's exchange and its view of the replica."""

    exchange: Exchange
    gradients: GradientBuffer
    optimizer: ReplicaOptimizer
    leaders: Collective


class ReplicaExchange(SharedModelExchange):
    """An `Exchange`: the replica's workers train together, and its leader exchanges as the strategy says."""

    def __init__(self, replica: Replica, method: Method, layout: Layout, spread: ModelSpread) -> None:
        super().__init__(replica, method, layout, spread)
        self._pushes_gradients = method.servers > 0
        self._lead: _Lead | None = None
        self._weight = 0.0  # the replica's part of the samples of the step
        self._updated_at: int | None = None  # the last step whose update has begun
        self._is_broken = False

    @property
    def recovery(self) -> Recovery:
        return self.method.recovery

    @property
    def holds_state(self) -> bool:
        """Only a leader knows what the strategy has done."""
        return self._lead is not None and not self._is_broken

    def _begin_groups(self) -> Groups:
        """The leaders begin as the strategy says; then each gives its replica what it has."""
        replica, collective, grid, cell = self.replica, self.replica.collective, self._grid, self._cell
        method = self.method
        groups = replica_groups_of(collective, grid)
        is_leader = cell is not None and groups.replica.rank == 0
        leaders = collective.split(0 if is_leader else 1)
        self._audience = collective.split(0 if cell is None or collective.rank == 0 else 1)  # rank 0 and spare workers
        if is_leader:
            replica.log.count_bytes(lambda: leaders.bytes_sent)
            piggybacked = replica.gradients.piggybacked.numel()
            # Parameters keep no gradients: they are summed where the replica shares them, and copied for servers.
            within, is_flat = (Solo(), True) if self._pushes_gradients else (leaders, False)
            gradients = GradientBuffer(self._flat.parameters, within, piggybacked, is_flat=is_flat, keeps_local=True)
            optimizer = ReplicaOptimizer(replica.optimizer, lambda: self._optimizer, self._update_together)
            whole = replace(
                replica,
                optimizer=optimizer,
                undivided=optimizer.undivided,
                gradients=gradients,
                collective=leaders,
                clip_norm=replica.clip_norm if method.is_lock_step else None,
            )
            exchange = self.method.exchange(whole)
            self._begun.callback(exchange.close)
            self._lead = _Lead(exchange, gradients, optimizer, leaders)
            exchange.begin()
        if cell is not None:
            for buffer in replica.model.buffers():
                groups.replica.broadcast_(buffer.detach())
            adopt_optimizer(replica.optimizer, groups.replica)
        return groups

    def _hold(self) -> None:
        size = self._inside.size
        self._weights = self._allocate(size, torch.float64)
        # What the leader says: two slots, so that it can continue while the others read.
        self._board_of_leader = self._allocate(2 * (2 + self._piggybacked.numel()), torch.float64).view(2, -1)
        self._said = 0
        super()._hold()

    @property
    def _piggybacked(self) -> torch.Tensor:
        return self.replica.gradients.piggybacked

    # What the leader does, and the others with it.

    def _together(self, act: Callable[[_Lead], float | None]) -> float:
        """The leader acts as the strategy says, the others as it says; all return its result."""
        if self._cell is None:
            return 0.0
        if self._lead is None:
            return self._follow()
        lead = self._lead
        lead.gradients.piggybacked.copy_(self._piggybacked)
        result = float(act(lead) or 0.0)
        self._piggybacked.copy_(lead.gradients.piggybacked)
        self._say(_DONE, result)
        return result

    def _say(self, word: float, result: float = 0.0) -> None:
        slot = self._board_of_leader[self._said % 2]
        slot[0], slot[1] = word, result
        slot[2:] = self._piggybacked
        self._said += 1
        self._inside.barrier()

    def _follow(self) -> float:
        while True:
            slot = self._board_of_leader[self._said % 2]
            self._said += 1
            self._inside.barrier()
            word = float(slot[0])
            if word == _UPDATE:
                self._update_own()
            elif word == _LOAD:
                self._load_optimizer(None)
            else:
                self._piggybacked.copy_(slot[2:])
                return float(slot[1])

    def _update_together(self) -> None:
        """What a step of the strategy's optimizer does."""
        self._say(_UPDATE)
        # A barrier that all have reached is complete for all of them: from here on all update, even if some die.
        self._updated_at = self._step + 1
        self._update_own()

    def _update_own(self) -> None:
        self._optimizer.update()
        self._inside.barrier()

    def _load_optimizer(self, state: dict[str, Any] | None) -> None:
        """Give the whole replica the state that the leader has loaded."""
        self._optimizer.leave()
        if state is not None:
            self.replica.optimizer.load_state_dict(state)
        adopt_optimizer(self.replica.optimizer, self._inside)
        self._make_optimizer()
        self._inside.barrier()
        self._optimizer.confirm()

    # The moments of a step.

    def before_forward(self) -> None:
        """Wait until the leader has what the strategy wants to train from."""

        def prepare(lead: _Lead) -> None:
            if lead.optimizer.pending is not None:
                state, lead.optimizer.pending = lead.optimizer.pending, None
                self._say(_LOAD)
                self._load_optimizer(state)
            lead.exchange.before_forward()

        self._together(prepare)

    def before_backward(self, weight: float) -> None:
        super().before_backward(weight if self._grid.shards > 1 else 1.0)

    def before_update(self, weight: float) -> bool:
        """The gradient of the replica: the mean over its samples, as one worker would have it."""
        if self._cell is not None:
            is_divided = self._grid.shards > 1
            self._weights[self._inside.rank] = weight
            self._sum_gradients(weight if is_divided else 1.0)
            self._agree_inside(weight)
            if is_divided and self._gradients.owned:
                torch._foreach_mul_(self._gradients.owned, 1.0 / self._weight if self._weight else 0.0)
            if self.replica.clip_norm is not None and not self.method.is_lock_step:  # otherwise the sum is clipped
                scale = self._weight if is_divided and self._weight else 1.0
                self._clip(self.replica.clip_norm, scale=scale)
            if self._pushes_gradients:
                self._give_gradients()
        return self._agreed(lambda lead: lead.exchange.before_update(self._weight))

    def _give_gradients(self) -> None:
        """Give the leader the whole gradient, in the order of the parameters."""
        self._inside.barrier()  # all have scaled what they own
        if self._lead is None:
            return
        summed, whole = self._memory[1], self._lead.gradients.flats[0]
        first = 0
        for leaf in itertools.chain(*self._lanes):
            size = leaf.high - leaf.low
            whole[leaf.low : leaf.high] = summed[first : first + size]
            first += size

    def _agree_inside(self, weight: float) -> None:
        """The replica's loss, and the requests of its workers, on all of them."""
        values = self._piggybacked
        is_of_loss = self._grid.of_loss(self.replica.collective.rank)
        values[: REQUESTS.start].mul_(weight if is_of_loss else 0.0)
        self._inside.all_reduce_(values)
        self._weight = float(self._weights[:: self._grid.per_team].sum())
        if self._weight:
            values[: REQUESTS.start].div_(self._weight)

    def update(self) -> None:
        if self._cell is None:
            return
        try:
            self._together(lambda lead: lead.exchange.update())
        except PeerFailed:
            self._count_update()
            raise

    def _count_update(self) -> None:
        """The replica's update was interrupted: if it has begun, it counts, and is completed by `merge`."""
        if self._lead is None or self._updated_at != self._step + 1:
            return
        if not self._optimizer.is_recoverable:
            self._is_broken = True
            return
        self._step += 1
        self._lead.leaders.abort()  # the strategy counts the step, and finds that it cannot exchange
        with suppress(PeerFailed):
            self._lead.exchange.after_update(self._weight)

    def after_update(self, weight: float) -> bool:
        del weight
        self._step += 1
        return self._agreed(lambda lead: lead.exchange.after_update(self._weight))

    def _agreed(self, act: Callable[[_Lead], bool]) -> bool:
        """Whether all have agreed in this moment; spare workers stop and save with the others."""
        return bool(self._heard(self._together(act)))

    def _heard(self, result: float) -> float:
        """Let spare workers know what rank 0 does."""
        if self._grid.workers == self.replica.collective.size:
            return result
        said = torch.cat([torch.tensor([result]), self._piggybacked])
        if self._audience.size > 1:
            self._audience.broadcast_(said)
        if self._cell is None:
            self._piggybacked.copy_(said[1:])
            return float(said[0])
        return result

    # Where replicas train at their own pace, each as one.

    @property
    def independent(self) -> Collective:
        """The leaders; the others of a replica do what its leader decides."""
        return self._lead.leaders if self._lead is not None else self.replica.collective

    def may_continue(self, limit_s: float) -> bool:
        return self._lead is None or self._lead.exchange.may_continue(limit_s)

    def decide(self, decision: Callable[[], int]) -> int:
        return int(self._heard(self._together(lambda _: decision())))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers hold the model that the strategy shares."""
        with ExitStack() as strategy:
            if self._lead is not None:
                strategy.enter_context(self._lead.exchange.shared())
            if self._cell is not None:
                self._inside.barrier()
            with super().shared():
                yield
        if self._cell is not None:
            self._inside.barrier()

    # When a worker has failed, and for checkpoints.

    def committed_steps(self) -> dict[int, int] | None:
        """Of each share, what the strategy says of its replica."""
        assert self._lead is not None, "asked of leaders only"
        known = self._lead.exchange.committed_steps()
        if known is None:
            return None
        replicas = {share: share // self._grid.shards for share in range(self._grid.shares)}
        return {share: known[replica] for share, replica in replicas.items() if replica in known}

    def merge(self, survivors: Collective) -> None:
        """Complete the replica's last update; then as the strategy says."""
        assert self._lead is not None, "only leaders hold something of their own"
        if self._updated_at is not None:
            for rank in self._optimizer.ranks_to_complete(self._updated_at):
                self._optimizer.complete(rank)
        if self._board is not None:
            self._board.read(self._step)
        self._lead.exchange.merge(survivors)

    def private_state(self) -> dict[str, Any] | None:
        return self._lead.exchange.private_state() if self._lead is not None else None

    def carried_state(self) -> dict[str, Any] | None:
        return {_LIVE: self._lead.exchange.carried_state()} if self._lead is not None else None

    def replacement_state(self) -> dict[str, Any] | None:
        return {_LIVE: self._lead.exchange.replacement_state()} if self._lead is not None else None

    def load_private_state(self, state: dict[str, Any]) -> None:
        if self._lead is None:
            return
        if _LIVE not in state:
            self._lead.exchange.load_private_state(state)
        elif state[_LIVE] is not None:
            with self._lead.optimizer.keeping_state():
                self._lead.exchange.load_private_state(state[_LIVE])
