"""A strategy between replicas that are spread over several workers: a replica is one worker of the strategy.

The first worker of each replica, its *leader*, has the strategy's own exchange, unchanged: with the whole model, which
lies in memory that the replica shares, and a collective of the leaders. The other workers of the replica do in each
step what the leader says: the moments of a step are the same for all of them, and when the strategy steps with its
optimizer, all of them update what they own.

What the replica has since the strategy's last exchange is its own. If one of its workers dies, the leader completes the
update in flight, and the replica's steps count as those of a worker that survives. If the leader dies, the replica
fails with it, as a worker does: its steps since the last exchange are repeated, and its other workers take over the
state of another replica, as new workers do.

Here: `ReplicaExchange`. Not here: how a leader leads (`led_replica.py`), what a replica holds (`held_replica.py`), and
the sum of exact gradients over all replicas, which needs no leaders (`shared_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from syncline.comms.collective import Collective, Solo
from syncline.errors import PeerFailed
from syncline.layouts.groups import Groups, replica_groups_of
from syncline.layouts.held_replica import HeldReplica
from syncline.layouts.led_replica import Leader, LedReplica, StateOfLeader
from syncline.layouts.replica_optimizer import ReplicaOptimizer
from syncline.layouts.shared_model import SharedModelExchange
from syncline.layouts.spread import ModelSpread
from syncline.strategies.exchange import REQUESTS, Replica
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.method import Method, Recovery
from syncline.strategies.methods.local_sgd import adopt_optimizer

if TYPE_CHECKING:
    from syncline.layouts.layout import Layout


class ReplicaExchange(StateOfLeader, SharedModelExchange):
    """An `Exchange`: the replica's workers train together, and its leader exchanges as the strategy says."""

    def __init__(self, replica: Replica, method: Method, layout: Layout, spread: ModelSpread) -> None:
        super().__init__(replica, method, layout, spread)
        self._pushes_gradients = method.servers > 0
        self._led = LedReplica(replica, lambda: self._step + 1)
        self._weight = 0.0  # the replica's part of the samples of the step
        self._is_broken = False

    @property
    def recovery(self) -> Recovery:
        return self.method.recovery

    @property
    def holds_state(self) -> bool:
        """Only a leader knows what the strategy has done."""
        return self._led.leader is not None and not self._is_broken

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
            optimizer = ReplicaOptimizer(replica.optimizer, lambda: self._led.held.optimizer, self._led.update)
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
            self._led.leader = Leader(exchange, gradients, optimizer, leaders)
            exchange.begin()
        if cell is not None:
            for buffer in replica.model.buffers():
                groups.replica.broadcast_(buffer.detach())
            adopt_optimizer(replica.optimizer, groups.replica)
        return groups

    def _hold(self, groups: Groups) -> HeldReplica:
        held = super()._hold(groups)
        self._weights = held.allocate(held.inside.size, torch.float64)
        self._led.hold(held)
        return held

    # The moments of a step.

    def before_forward(self) -> None:
        """Wait until the leader has what the strategy wants to train from."""

        def prepare(leader: Leader) -> None:
            if leader.optimizer.pending is not None:
                state, leader.optimizer.pending = leader.optimizer.pending, None
                self._led.load_optimizer(state)
            leader.exchange.before_forward()

        if self._cell is not None:
            self._led.together(prepare)

    def before_backward(self, weight: float) -> None:
        super().before_backward(weight if self._grid.shards > 1 else 1.0)

    def before_update(self, weight: float) -> bool:
        """The gradient of the replica: the mean over its samples, as one worker would have it."""
        held = self._held
        if held is not None:
            is_divided = self._grid.shards > 1
            self._weights[held.inside.rank] = weight
            held.sum_gradients(weight if is_divided else 1.0, self._step + 1)
            self._agree_inside(held, weight)
            if is_divided and held.rounds.owned:
                torch._foreach_mul_(held.rounds.owned, 1.0 / self._weight if self._weight else 0.0)
            if self.replica.clip_norm is not None and not self.method.is_lock_step:  # otherwise the sum is clipped
                scale = self._weight if is_divided and self._weight else 1.0
                held.clip(self.replica.clip_norm, scale=scale)
            if self._pushes_gradients:
                self._led.give_gradients()
        return self._agreed(lambda leader: leader.exchange.before_update(self._weight))

    def _agree_inside(self, held: HeldReplica, weight: float) -> None:
        """The replica's loss, and the requests of its workers, on all of them."""
        values = self.replica.gradients.piggybacked
        is_of_loss = self._grid.of_loss(self.replica.collective.rank)
        values[: REQUESTS.start].mul_(weight if is_of_loss else 0.0)
        held.inside.all_reduce_(values)
        self._weight = float(self._weights[:: self._grid.per_team].sum())
        if self._weight:
            values[: REQUESTS.start].div_(self._weight)

    def update(self) -> None:
        if self._cell is None:
            return
        try:
            self._led.together(lambda leader: leader.exchange.update())
        except PeerFailed:
            self._count_update()
            raise

    def _count_update(self) -> None:
        """The replica's update was interrupted: if it has begun, it counts, and is completed by `merge`."""
        leader = self._led.leader
        if leader is None or self._led.updated_at != self._step + 1:
            return
        if not self._led.held.optimizer.is_recoverable:
            self._is_broken = True
            return
        self._step += 1
        leader.leaders.abort()  # the strategy counts the step, and finds that it cannot exchange
        with suppress(PeerFailed):
            leader.exchange.after_update(self._weight)

    def after_update(self, weight: float) -> bool:
        del weight
        self._step += 1
        return self._agreed(lambda leader: leader.exchange.after_update(self._weight))

    def _agreed(self, act: Callable[[Leader], bool]) -> bool:
        """Whether all have agreed in this moment; spare workers stop and save with the others."""
        return bool(self._heard(self._led.together(act) if self._cell is not None else 0.0))

    def _heard(self, result: float) -> float:
        """Let spare workers know what rank 0 does."""
        if self._grid.workers == self.replica.collective.size:
            return result
        piggybacked = self.replica.gradients.piggybacked
        said = torch.cat([torch.tensor([result]), piggybacked])
        if self._audience.size > 1:
            self._audience.broadcast_(said)
        if self._cell is None:
            piggybacked.copy_(said[1:])
            return float(said[0])
        return result

    # Where replicas train at their own pace, each as one.

    @property
    def independent(self) -> Collective:
        """The leaders; the others of a replica do what its leader decides."""
        return self._led.leader.leaders if self._led.leader is not None else self.replica.collective

    def may_continue(self, limit_s: float) -> bool:
        return self._led.leader is None or self._led.leader.exchange.may_continue(limit_s)

    def decide(self, decision: Callable[[], int]) -> int:
        return int(self._heard(self._led.together(lambda _: decision()) if self._cell is not None else 0.0))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers hold the model that the strategy shares."""
        with ExitStack() as strategy:
            if self._led.leader is not None:
                strategy.enter_context(self._led.leader.exchange.shared())
            if self._held is not None:
                self._held.inside.barrier()
            with super().shared():
                yield
        if self._held is not None:
            self._held.inside.barrier()

    def committed_steps(self) -> dict[int, int] | None:
        """Of each share, what the strategy says of its replica."""
        known = self._led.exchange.committed_steps()
        if known is None:
            return None
        replicas = {share: share // self._grid.shards for share in range(self._grid.shares)}
        return {share: known[replica] for share, replica in replicas.items() if replica in known}

    def merge(self, survivors: Collective) -> None:
        """Complete the replica's last update; then as the strategy says."""
        led, held = self._led, self._led.held
        if led.updated_at is not None:
            for rank in held.optimizer.ranks_to_complete(led.updated_at):
                held.optimizer.complete(rank)
        if held.board is not None:
            held.board.read(self._step)
        led.exchange.merge(survivors)
