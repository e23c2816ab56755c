"""The order of a step, for the built-in loop (`loop.py`) and a user's own loop (`own_loop.py`) alike.

    enter_view    once per View: synchronize state, tune, build replica and exchange
    begin_step    check membership, run the fault hook, seed, let the strategy prepare the forward pass
    (the loop)    forward and backward on this worker's share
    update        exchange, clip, update, advance the position, record; a user's own loop may do its two halves
                  separately (`combine`, `complete`), and for several optimizers
    end_step      save a checkpoint or stop, if all workers agreed on it in `update`
    finish        save the last checkpoint and complete the ledger

Here: `Stepper`, which puts these in order. Not here: what they do (`state_sync.py`, `replica.py`, `update.py`,
`data_progress.py`, `checkpoints.py`), and joining a View (`session.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from syncline.compute.allocator import release_freed
from syncline.data.assignment import Position, total
from syncline.data.order import SampleOrder, Share
from syncline.layouts.spread import ModelSpread
from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.events import Recovered
from syncline.workers.data_progress import DataProgress
from syncline.workers.replica import OwnLoop, build_replicas, group_of, rebuild_replica
from syncline.workers.rounds import LoopRound
from syncline.workers.saving_alone import SavingAlone
from syncline.workers.session import Session
from syncline.workers.state_sync import StateSync, Synced
from syncline.workers.step_hook import step_hook
from syncline.workers.train_state import TrainState
from syncline.workers.update import Outcome, Updater

AfterUpdate = Callable[[Share, Outcome, float | None], None]

_NO_SAMPLES = np.empty(0, np.int64)


def begin_round(session: Session, number: int) -> None:
    """What begins a step, for a round of a fit by blocks, which has no samples, model or strategy."""
    session.check_membership()
    session.in_flight = (number, np.empty(0, np.int64))
    hook = step_hook()
    if hook is not None and session.run_dir is not None:
        hook.at_step(session.worker_id, number, session.run_dir.path)


class Stepper:
    """Takes one worker through the steps of a run, over all Views of which it is a member.

    `after_update(share, outcome, loss)` is called in every step before it is recorded: the built-in loop advances its
    schedule there.
    """

    replicas: list[Replica]
    """One for each optimizer; the built-in loop has one."""
    exchange: Exchange
    """Of all optimizers together."""
    state: TrainState
    is_from_checkpoint: bool
    """Whether all members of this View began with a checkpoint, or at the start of the run."""

    def __init__(
        self,
        session: Session,
        order: SampleOrder,
        *,
        epochs: int | None,
        after_update: AfterUpdate | None = None,
        round: LoopRound | None = None,
    ) -> None:
        """`round` is that of a user's own loop."""
        self.session = session
        self.progress = DataProgress(session, order, epochs=epochs)
        self._sync, self._round = StateSync(session, self.progress, round), round
        self._after_update = after_update
        self._step_hook = step_hook()
        self._built: list[tuple[Replica, Exchange]] = []
        self.exchanges: list[Exchange] = []
        """One for each optimizer."""
        self._outcome: Outcome | None = None  # of the last step, until `end_step`
        self._recovery: Callable[[int], Recovered] | None = None  # what to report after the first step of this View
        self.alone = SavingAlone(session, self.progress, self._sync, round)
        session.save_alone = self.alone.save

    @property
    def replica(self) -> Replica:
        return self.replicas[0]

    @property
    def can_be_interrupted(self) -> bool:
        """Whether the failure of another process can interrupt a step, or a replacement may have to repeat it."""
        has_peers = self.session.plan.size > 1 if self._round is None else self.session.has_peers
        return has_peers or self.session.plan.servers > 0

    def enter_view(
        self,
        state: TrainState,
        *,
        clip_norm: float | None = None,
        score: Callable[[], tuple[float, float]] | None = None,
        tune: Callable[[], None] | None = None,
        spread: Callable[[], ModelSpread | None] = lambda: None,
        own_loop: OwnLoop | None = None,
    ) -> None:
        """Get ready to train `state` with the members of the View that the session has joined; they do so together.

        `tune` is called when `state` is current, before its gradients are laid out, and `spread` after it: it says how
        the model is spread over the workers, if they do not hold it whole.
        """
        session, progress = self.session, self.progress
        session.recorder.waits = True
        session.checkpoints.open()
        progress.report_used()
        step_before = progress.position.step
        synced = self._sync.synchronize(state)
        self.is_from_checkpoint = synced.from_checkpoint
        if tune is not None:
            tune()
        start = progress.position
        self.state = state
        built = build_replicas(
            session,
            state,
            synced.private,
            step=start.step,
            steps_per_epoch=progress.order.steps_per_epoch,
            clip_norm=clip_norm,
            score=score,
            own_loop=own_loop,
            is_settled=synced.is_inherited,
            spread=spread(),
        )
        self._built, self._clip_norm = built, clip_norm
        self.replicas, self.exchange = [replica for replica, _ in built], group_of(built)
        self.exchanges = [exchange for _, exchange in built]
        if self._sync.is_first or not synced.is_inherited:
            progress.updated_at = progress.position.step
        if self._sync.is_first:
            release_freed()  # copies of the model, and what measuring it took, are not needed any more
            session.peak_memory.reset()  # start-up does not count
        self._sync.hold(state, self.exchange)
        self._updaters = [Updater(*b, session.recorder, requests=session, clip_norm=clip_norm) for b in built]
        if not synced.is_inherited:
            self._outcome = None
            progress.open_view(from_checkpoint=synced.from_checkpoint)
        session.in_flight = (start.step, _NO_SAMPLES)
        self._recovery = self._recovery_report(synced, step_before) if session.view > 1 else None

    def lay_out(self, number: int, parameters: Sequence[torch.Tensor]) -> None:
        """Lay out the gradients of optimizer `number` anew, for these `parameters`; all members call this together."""
        session = self.session
        built = rebuild_replica(session, self.replicas[number], parameters, self.progress.position.step)
        self._built[number], self.replicas[number] = built, built[0]
        self.exchange = group_of(self._built)
        self.exchanges[number] = built[1]
        self._sync.hold(self.state, self.exchange)
        self._updaters[number] = Updater(*built, session.recorder, requests=session, clip_norm=self._clip_norm)

    def begin_step(self, share: Share, *, continues: bool = False, is_carried: bool = False) -> None:
        """Everything that comes before the forward pass on `share`.

        Raises `PeerFailed` if the membership has changed, unless the step `continues`: its gradients are accumulated
        over several batches, of which this is not the first. With `is_carried`, the share was taken in the step before,
        as one with which that continued.
        """
        session, step = self.session, share.position.step
        if is_carried:
            session.check_membership()
        else:
            session.recorder.mark("data")
            self.check_membership(step, continues=continues)
        session.in_flight = (step, share.indices)
        rank = self.progress.rank if self.progress.order.is_counted else 0  # without data, all compute the same
        session.seed_step(step, session.rank if rank is None else rank)
        session.recorder.waits = False
        if not is_carried:
            self.exchange.before_forward()
        if not continues:
            self.state.begin_step(may_fail=self.can_be_interrupted)

    def check_membership(self, step: int, *, continues: bool = False) -> None:
        """Raise `PeerFailed` if the membership has changed, unless the step continues; run the fault hook."""
        session = self.session
        if not continues:
            session.check_membership()
        if self._step_hook is not None and session.run_dir is not None:
            self._step_hook.at_step(session.worker_id, step, session.run_dir.path)

    def update(self, share: Share, loss: float | None = None, correct: float | None = None) -> Outcome:
        """Everything from the exchange to the record of the step; `loss` and `correct` are this worker's means."""
        after = share.after
        is_together = self._is_together(after)
        outcome = self._updaters[0](share.weight, loss, correct, step=after.step, is_together=is_together)
        self._commit([share], outcome, loss)
        return outcome

    def combine(self, number: int, weight: float, *, mark: int | None = None) -> bool:
        """The first half of an update of optimizer `number`; False if `mark` is not the same on all workers."""
        return self._updaters[number].combine(weight, mark=mark)

    def complete(
        self, number: int, weight: float, shares: Sequence[Share], *, update: Callable[[], None] | None = None
    ) -> Outcome:
        """The second half. `shares` are the batches that it commits; `update` replaces the exchange's own."""
        after = shares[-1].after if shares else self.progress.position
        is_together = bool(shares) and self._is_together(after)
        outcome = self._updaters[number].apply(weight, step=after.step, is_together=is_together, update=update)
        before = self._outcome
        self._commit(shares, outcome._replace(loss=None, correct=None), None)  # only the script knows them
        if before is not None:  # of another optimizer in the same step
            self._outcome = outcome._replace(stop=outcome.stop or before.stop, save=outcome.save or before.save)
        return outcome

    def skip(self, shares: Sequence[Share]) -> None:
        """The user's loop has taken these batches, and made no update with them."""
        for share in shares:
            self.progress.advance(share, is_skipped=True)

    def pass_over(self, shares: Sequence[Share], *, is_used: bool) -> None:
        """Other workers have made the update of these batches; `is_used`: with this worker's gradients in it."""
        for share in shares:
            if is_used:
                self.progress.advance(share)
            else:
                self.progress.pass_over(share)
        self.progress.updated_at = self.progress.position.step

    def _is_together(self, after: Position) -> bool:
        return after.cursor == 0 or self.progress.is_complete(after)

    def _commit(self, shares: Sequence[Share], outcome: Outcome, loss: float | None) -> None:
        """The update is made: its samples count."""
        session, recorder = self.session, self.session.recorder
        self.state.end_step()
        for share in shares:
            self.progress.advance(share)
        self.progress.has_exchanged = True
        position = self.progress.position
        self.progress.updated_at = position.step
        session.in_flight = (position.step, _NO_SAMPLES)  # the samples of the next step are not known yet
        if self._after_update is not None:
            self._after_update(shares[-1], outcome, loss)
        if self._recovery is not None:
            self._report_recovery(self._recovery(position.step))
        if shares:
            last = shares[-1]
            samples, batch, after = len(last.indices), last.batch, last.after
            for share in shares[:-1]:  # accumulated
                samples, batch = samples + len(share.indices), batch + share.batch
            if self._round is not None:
                after = replace(after, step=self._round.steps + 1)  # not how many batches were taken
            recorder.step(after, samples, batch, outcome.loss, outcome.correct, self.state.lr)
        self._outcome = outcome

    def end_step(self) -> Literal["stopped", "complete"] | None:
        """Why the loop ends after the last step; None if it continues, with a checkpoint if all workers agreed to."""
        if self.progress.has_exchanged:
            self.progress.end_inheritance()
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        if outcome.stop:
            return "stopped"
        if self.progress.is_complete(self.progress.position):
            return "complete"
        if outcome.save:
            self.save()
        return None

    def save(self, *, is_last: bool = False) -> None:
        """Save a checkpoint, in the background unless it is the last one; all workers call this together."""
        self.session.recorder.waits = True
        self.progress.report_used()
        self.session.checkpoints.save(
            self.progress.position,
            self.progress.remaining().requeued,
            self.progress.order.count,
            self.state,
            self.replica,
            self.exchange,
            is_last=is_last,
        )

    def end_loop(self) -> None:
        """Wait for the other workers' loops to end at the same step."""
        self.progress.end_inheritance()
        self._updaters[0].meet(self.progress.position.step)

    def finish(self, *, stopped_early: bool) -> dict[str, int]:
        """Complete the run; all workers call this together. The peak memory of each, by worker_id."""
        self.session.expect_long_waits()
        self.save(is_last=True)
        peak_memory = self.session.gather_peak_memory()
        self.session.collective.barrier()  # no worker leaves before the checkpoint is on disk
        self.progress.close(stopped_early=stopped_early)
        return peak_memory

    def _recovery_report(self, synced: Synced, step_before: int) -> Callable[[int], Recovered]:
        session, progress = self.session, self.progress
        return lambda step: Recovered(
            view=session.view,
            members=session.members,
            step=step,
            repeated_steps=max(0, step_before - progress.start.step) if synced.from_checkpoint else 0,
            repeated_samples=total(progress.assignment.requeued),
            seconds=time.monotonic() - session.interrupted_at,
            state_bytes=synced.bytes_received,
        )

    def _report_recovery(self, event: Recovered) -> None:
        """After the first step of a View; rank 0 reports for all."""
        if self.session.rank == 0:
            self.session.recorder.emit(event)
        self._recovery = None
