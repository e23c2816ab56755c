"""What happens in the objects that a script uses: joining, taking a batch, recovering, ending.

Here: `LoopTraining`, one for each run of a script. It drives the `Stepper`, and keeps the script where it is when the
membership changes. Not here: the objects themselves (`worker.py`, `batches.py`, `optimizer.py`), updates
(`updates.py`), and what a round is (`workers/rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from syncline.comms.collective import Solo
from syncline.data.assignment import Position
from syncline.data.order import SampleOrder, Share
from syncline.errors import ConfigError, PeerFailed
from syncline.workers.own_loop.in_use import BatchesInUse
from syncline.workers.own_loop.lateness import epoch_when_started, is_aborted, is_late, is_outdated
from syncline.workers.own_loop.optimizer import plain_optimizer
from syncline.workers.own_loop.parts import PreparedParts
from syncline.workers.own_loop.script import LoopLeft, LoopRestarted, LoopStopped
from syncline.workers.own_loop.tuning import LoopTuner
from syncline.workers.own_loop.updates import LoopUpdates
from syncline.workers.replica import OwnLoop
from syncline.workers.rounds import LoopRound, ScriptMustRestart
from syncline.workers.session import Session
from syncline.workers.stepper import Stepper
from syncline.workers.train_state import Parts, TrainState

NO_DATA = SampleOrder(seed=0, count=1, batch=1, shuffle=False, is_counted=False)
"""For a script that takes no batches from Syncline: its steps are counted, but no samples."""


class LoopTraining:
    """The training of one run of a script; `earlier` is that of the last run in this process, if it was restarted."""

    def __init__(self, session: Session, earlier: LoopTraining | None = None) -> None:
        self.session = session
        self.round: LoopRound = earlier.round if earlier is not None else LoopRound()
        self.stepper: Stepper | None = earlier.stepper if earlier is not None else None
        self.order: SampleOrder | None = None
        """The order of the training samples, if the script takes batches from Syncline."""
        self.clip_norm: float | None = None
        self.is_entered = False
        """Whether this run of the script has joined the training."""
        self.epoch_at_start = self.first_epoch = 0
        """The first epoch that had batches left when it joined, and the first whose end the script had not reached."""
        self.is_passing_over = self._joined_alone = False
        """Whether the script runs through epochs that are done, and whether the others are in the middle of theirs."""
        self.share: Share | None = None
        """The batch that was taken last."""
        self.in_use = BatchesInUse(self)
        method = session.strategy.method  # which is made anew each time, and asked for in every step
        self._sums_gradients = method.is_lock_step and method.recovery == "equal"
        self._is_asynchronous = method.is_asynchronous
        self.updates = LoopUpdates(self)
        self.parts = PreparedParts(self)
        self.tuner = LoopTuner(self)
        self._progress_at_start: Any = None
        self.on_end: list[Callable[[], None]] = []
        """What to close when the script has ended."""

    # Joining

    @property
    def is_replacement(self) -> bool:
        """Whether this worker was started later than the run, and has not joined it yet."""
        return not self.is_entered and is_late(self.session)

    @property
    def is_catching_up(self) -> bool:
        """Whether this worker repeats what the others have done long ago: it has nothing to exchange with them."""
        return self.is_replacement or (self.is_passing_over and self._joined_alone)

    @property
    def is_lock_step(self) -> bool:
        """Whether all workers apply one sum of gradients, which this worker has before it updates."""
        return self.session.plan.size == 1 or self._sums_gradients

    @property
    def is_asynchronous(self) -> bool:
        return self.session.plan.size > 1 and self._is_asynchronous

    def enter(self) -> None:
        """Join the training, if this script has not: load the state of the others or of a checkpoint."""
        if self.is_entered:
            return
        self.parts.check()
        if self.session.plan.size > 1:
            self.session.layout.check_loop([plain_optimizer(optimizer) for optimizer in self.parts.optimizers])
        was_late, self.is_entered = is_late(self.session), True
        if self.session.view == 0 or is_outdated(self.session):
            self._join()
        order = self.order or NO_DATA
        if self.stepper is None:
            self.stepper = Stepper(self.session, order, epochs=None, round=self.round)
        _check_same_data(self.stepper.progress.order, order)
        parts = self.parts
        self.state = TrainState(lambda: Parts(parts.model, parts.optimizer, parts.schedulers, parts.script))
        self._enter_view()
        self._progress_at_start = self.state.progress()
        position = self.progress.position
        is_owed = position.cursor == 0 and self.progress.assignment.has_requeued_after(position.step)
        self.epoch_at_start = position.epoch - 1 if is_owed else position.epoch
        self.first_epoch = min(self._progress_at_start.epochs_closed, self.epoch_at_start)
        self.is_passing_over = self.first_epoch > 0
        self._joined_alone = was_late and not self.stepper.is_from_checkpoint
        if self.order is None:
            # All workers compute the same gradient, so its mean over them is right, whatever the loss.
            self.updates.weights.is_summed = False

    def _join(self) -> None:
        if not self.session.join_view():
            raise LoopLeft(0)

    def _enter_view(self) -> None:
        """Get ready with the members of the View; if another worker fails meanwhile, with those of the next."""
        assert self.stepper is not None
        plain = [plain_optimizer(optimizer) for optimizer in self.parts.optimizers]
        own_loop = OwnLoop(plain, self.parts.groups.agree, _RoundStatistics(self))
        while True:
            try:
                self.stepper.enter_view(
                    self.state, clip_norm=self.clip_norm, tune=self.tuner.enter_view, own_loop=own_loop
                )
                return
            except ScriptMustRestart:
                raise LoopRestarted(0) from None
            except PeerFailed:
                self._join()

    def recover(self, *, is_between_rounds: bool = False) -> None:
        """The membership has changed: continue in the next View, at the same place of the script."""
        assert self.stepper is not None
        if self.session.plan.size == 1 and not is_between_rounds and not is_aborted(self.session):
            # Nothing was exchanged with anyone. Others who join have no record of this round: they join after it.
            self.session.collective = Solo()
            return
        self.session.recorder.waits = True
        for replica in self.stepper.replicas:
            replica.gradients.restore_local()
        self._join()
        self._enter_view()

    @property
    def progress(self) -> Any:
        assert self.stepper is not None, "the script has joined"
        return self.stepper.progress

    # Batches

    @property
    def batch(self) -> int:
        """The number in its epoch of the batch that was taken last, from 0."""
        share, order = self.share, self.order
        return share.position.cursor // order.batch if share is not None and order is not None else 0

    def begin_epoch(self, epoch: int) -> bool:
        """The script iterates over its batches for the `epoch`-th time. False if that epoch is done."""
        if self.is_replacement and epoch < epoch_when_started(self.session):
            return False  # the others are further: join them there
        self.enter()
        self.end_step()
        if epoch == self.first_epoch and self.is_passing_over:
            # While the loop passed over epochs that are done, it has advanced its schedulers and counters once more.
            self.state.load_schedule(self._progress_at_start)
            self.parts.script.load_state_dict(self._progress_at_start.script)
        if epoch >= self.first_epoch:
            self.is_passing_over = False
            self.state.epochs_closed = epoch
        if epoch < self.epoch_at_start:
            return False
        self.in_use.skip_unused()
        taken = self.round.taken.shares if self.round.is_open else []
        position = taken[-1].after if taken else self.progress.position
        if epoch > position.epoch:  # the loop left the last epoch early
            self.in_use.skip(len(taken))
            self.progress.skip_to(Position(epoch, 0, position.step, position.extra))
        return True

    def end_step(self, *, carries: bool = False) -> None:
        """The script asks for a batch, so it has completed its last step: its schedulers have advanced.

        If it asks in the middle of a step, that is so only when it computes with the batch, which it `carries` over.
        """
        assert self.stepper is not None
        if self.round.is_open and not carries:
            return
        while True:
            try:
                ending = self.stepper.end_step()
                break
            except PeerFailed:  # while saving
                self.recover(is_between_rounds=True)
        if ending is not None:
            self.round.taken.clear()
            raise LoopStopped(0) if ending == "stopped" else SystemExit(0)

    def begin_batch(self, share: Share) -> bool:
        """The script takes `share`. False if the membership has changed: then it takes what it is assigned now."""
        assert self.stepper is not None
        self.in_use.skip_unused()
        continues = self.round.is_open
        try:
            if not continues:
                self.tuner.before_round()
                self.in_use.end_batch()
                self.round.begin(share.position.step, self.state, may_fail=self.stepper.can_be_interrupted)
                self.begin_round()
            self.stepper.begin_step(share, continues=continues)
        except PeerFailed:
            self.recover(is_between_rounds=True)
            return False
        self.share = share
        self.in_use.take(share, is_ahead=continues and self.round.taken.is_computed)
        return True

    def begin_round(self) -> None:
        """A new round has begun: no gradients of it are there yet."""
        self.updates.weights.begin()
        self.parts.groups.begin_round()

    def on_forward(self) -> None:
        """A prepared model is about to compute: with the state of the run, not with its initial parameters."""
        if not self.parts.optimizers or (self.is_replacement and self.order is not None):
            return
        self.enter()
        if torch.is_grad_enabled():
            self.begin_without_data()
            self.in_use.compute()

    def begin_without_data(self) -> None:
        """If the script takes no batches from Syncline, its round begins with the first thing after an update."""
        if self.order is not None or self.round.is_open:
            return
        self.end_step()
        while not self.begin_batch(_without_data(self.progress.position)):
            pass

    def set_order(self, order: SampleOrder) -> None:
        """The script will take batches in this order."""
        if self.is_entered:
            raise ConfigError(
                "The training has begun, with the first forward pass or step, and the script prepares its batches only "
                "now. Call worker.prepare(loader) or worker.batches before.",
                code="prepared-late",
                what="batches",
            )
        self.order = order

    # The end

    def close(self) -> None:
        """This run of the script ends: stop what it has started."""
        for close in self.on_end:
            close()

    def finish(self, *, stopped_early: bool) -> dict[str, int]:
        """The script has ended: wait for the others, save. The peak memory of each worker, by worker_id."""
        self.parts.check_used(self.is_entered)
        self.enter()
        stepper = self.stepper
        assert stepper is not None
        self.in_use.end_batch()
        self.close()
        self.round.has_ended = True
        self.session.recorder.flush(self.progress.position, self.state.lr)
        while True:
            try:
                if self.round.is_open:
                    self.in_use.skip(len(self.round.taken))
                stepper.end_loop()
                return stepper.finish(stopped_early=stopped_early)
            except PeerFailed:
                self.recover(is_between_rounds=True)


class _RoundStatistics:
    """A `StatisticsExchange` of a round: after a failure the exchange is repeated with the members that are left."""

    def __init__(self, training: LoopTraining) -> None:
        self._training = training

    def table_of(self, row: torch.Tensor) -> torch.Tensor:
        def perform() -> torch.Tensor:
            collective = self._training.session.collective
            table = torch.zeros(collective.size, len(row), dtype=row.dtype, device=row.device)
            table[collective.rank] = row
            collective.all_reduce_(table)
            return table

        table: torch.Tensor = self._training.round.exchange_values(perform, self._training.recover)
        return table

    def sum_of(self, sums: torch.Tensor, weight: float) -> torch.Tensor:
        def perform() -> torch.Tensor:
            total = sums.clone()
            self._training.session.collective.all_reduce_(total, weight)
            return total

        total: torch.Tensor = self._training.round.exchange_values(perform, self._training.recover)
        return total


def _without_data(position: Position) -> Share:
    """A step without samples, in a script that takes no batches from Syncline."""
    after = Position(position.epoch + 1, 0, position.step + 1, position.extra)
    return Share(position, np.empty(0, np.int64), 0, (), after)


def _check_same_data(before: SampleOrder, now: SampleOrder) -> None:
    if before != now:
        raise ConfigError(
            "The script was restarted because the membership changed, and its data is different now: "
            f"{now.count} samples in batches of {now.batch}, before {before.count} in batches of {before.batch}. "
            "A script must prepare the same data each time, or run with --on-worker-failure stop.",
            code="different-data",
        )
