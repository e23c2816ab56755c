"""Bringing the members of a new View to one state.

Here: `StateSync`. When the membership changes, the members compare what they hold, decide from where to continue
(`recovery.py` has the rule), and send state to those whose own is stale; or all load the newest checkpoint. Not here:
how a strategy merges replicas (`strategies/`), and building the replica afterwards (`replica.py`).
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from syncline.checkpoint.schema import CheckpointState, TrainingProgress, TrainingState, data_has_changed
from syncline.comms.serialize import dump_state, load_state
from syncline.data.assignment import Position
from syncline.strategies.exchange import Exchange
from syncline.workers.data_progress import DataProgress
from syncline.workers.recovery import Standing, SyncPlan, decode, encode, plan_sync
from syncline.workers.rounds import LoopRound, ScriptMustRestart
from syncline.workers.session import Session
from syncline.workers.train_state import TrainState


class Synced(NamedTuple):
    """How this worker's state came about."""

    private: dict[str, Any] | None
    """What this worker's strategy kept for itself, if anything."""
    from_checkpoint: bool
    """Whether all members went back to the newest checkpoint, or to the start of the run."""
    bytes_received: int = 0
    """How much live state the source has sent."""
    is_inherited: bool = False
    """Whether the members complete the round of the last View first; until then the ledger is in that View."""


class HeldState(NamedTuple):
    """What a worker holds from the last View in which it trained."""

    state: TrainState
    exchange: Exchange
    rank: int
    """The share that it computed."""


class StateSync:
    """One worker's part in synchronizing state; it lives as long as the worker.

    `round` is the round of a user's own loop that this worker is in, None in the built-in loop.
    """

    def __init__(self, session: Session, progress: DataProgress, round: LoopRound | None = None) -> None:
        self._session, self._progress, self._round = session, progress, round
        self._held: HeldState | None = None
        self._has_held = False
        self._view = 0  # the last View whose state this worker holds

    @property
    def is_first(self) -> bool:
        """Whether this worker has not trained in any View yet."""
        return not self._has_held

    def hold(self, state: TrainState, exchange: Exchange) -> None:
        """Remember what this worker trains in the current View; a spare worker does not train."""
        share = self._session.place.share
        self._held = HeldState(state, exchange, share) if share is not None else None
        self._has_held = self._has_held or share is not None

    def complete_state(self) -> HeldState | None:
        """What this worker holds, if that has every completed step of all workers; otherwise None."""
        # Between agreeing on a new View and entering it, state and progress belong to different Views.
        return self._equal_held() if self._view == self._progress.view else None

    def equal_state(self) -> HeldState | None:
        """What this worker holds, if all members of the View hold the same after as many steps; otherwise None."""
        return self._equal_held() if self._view == self._session.view else None

    def _equal_held(self) -> HeldState | None:
        is_equal = (
            self._held is not None and self._held.exchange.recovery == "equal" and self._held.exchange.is_complete
        )
        return self._held if is_equal else None

    def synchronize(self, state: TrainState) -> Synced:
        """Bring `state` and the progress to where all members continue; they call this together.

        `state` may be a new object: a user's script that was restarted has built a new model. Raises
        `ScriptMustRestart` if this worker is inside a script that cannot continue in place.
        """
        session, order = self._session, self._progress.order
        while True:
            mine = self._standing(state)
            standings = [decode(data) for data in session.collective.all_gather(encode(mine))]
            plan = plan_sync(
                standings,
                count=order.count,
                batch=order.batch,
                epochs=self._progress.epochs,
                shares=session.place.grid.shares,
            )
            if not _must_restart(plan, standings):
                break
            if mine.in_place:
                raise ScriptMustRestart  # the others have restarted, or wait here for those that restart
        if self._held is not None and not (plan is not None and plan.is_inherited):
            self._held.state.undo_step()
        return self._load_checkpoint(state) if plan is None else self._exchange_state(plan, standings, state)

    def _standing(self, state: TrainState) -> Standing:
        worker_id = self._session.worker_id
        if self._held is None or not self._held.exchange.holds_state:
            return Standing(worker_id)
        held, exchange, rank = self._held
        recovery, committed = exchange.recovery, exchange.committed_steps() if exchange.recovery == "merge" else None
        if recovery == "merge" and committed is None:
            recovery = "saved"
        # A worker that was interrupted while exchanging, after its own update, has done that step.
        position, progress = self._progress.position, self._progress
        step = max(position.step, (committed or {}).get(rank, 0), progress.inherited_at or 0)
        if step > position.step:
            held.end_step()
        standing = Standing.of(worker_id, self._view, step, progress.assignment, recovery, committed or {})
        if self._round is None:
            return standing
        return msgspec.structs.replace(
            standing,
            holders=progress.holders,
            updates=self._round.updates,
            round_start=self._round.start,
            in_place=held is state,
            is_repeating=self._round.is_update_done,
            has_ended=self._round.has_ended,
            is_ahead=bool(self._round.taken.ahead),
        )

    def _exchange_state(self, plan: SyncPlan, standings: list[Standing], state: TrainState) -> Synced:
        """Continue with the live state of the survivors."""
        session, held = self._session, self._held
        is_survivor, is_stale = session.rank in plan.survivors, session.rank in plan.stale
        if plan.merges or (plan.is_inherited and session.layout.divides_updates):
            with closing(session.collective.split(int(is_survivor))) as survivors:
                if is_survivor and held is not None:
                    (held.exchange.merge if plan.merges else held.exchange.finish_updates)(survivors)
        if self._round is not None:
            self._round.catch_up(session.collective)
        data = self._send_state(plan)
        # Only now: if that had failed, this worker would still stand where it stood in the last View.
        received = load_state(data) if data else None
        self._continue(plan, standings, received)
        bytes_received = len(data) if plan.stale else 0
        if is_stale:
            assert received is not None, "the source sends its whole state if a member is stale"
            if is_survivor and plan.is_inherited:
                state.load_tensors(TrainingState.from_dict(received["training"]))  # the script's own schedule counts
            else:
                state.load(TrainingState.from_dict(received["training"]))
            return Synced(received["private"], False, bytes_received, plan.is_inherited)
        if held is not None and state is not held.state:
            state.load(held.state.state())
        if received is not None and self._round is None:
            state.load_progress(TrainingProgress.from_dict(received["training"]))  # the source's schedule counts
        private = held.exchange.carried_state() if held is not None else None
        return Synced(private, False, bytes_received, plan.is_inherited)

    def _continue(self, plan: SyncPlan, standings: list[Standing], received: dict[str, Any] | None) -> None:
        """Bring the progress and the round to where this worker continues."""
        progress, best, is_survivor = self._progress, standings[plan.source], self._session.rank in plan.survivors
        if not plan.is_inherited:
            progress.begin_assignment(plan.assignment)
            if self._round is not None:
                self._round.drop(progress.position.step)
                if not plan.merges:
                    self._round.updates = progress.position.step  # a new worker has counted none of them
        else:
            assert self._round is not None, "only a user's own loop inherits an assignment"
            is_stale = self._session.rank in plan.stale
            if not is_survivor and received is not None:
                self._round.replay(received["round"])
            elif is_stale:
                self._round.adopt_update(best.updates)
            at = progress.position.step if not is_stale else best.step if is_survivor else best.round_start
            progress.inherit_assignment(plan.assignment, best.holders, at=at, applied=best.step)
        self._view = self._session.view

    def _send_state(self, plan: SyncPlan) -> bytes:
        """The source's state, on all members: whole if a member is stale, otherwise only its progress."""
        if not plan.stale and not plan.merges:
            return b""
        data = b""
        if self._session.rank == plan.source and self._held is not None:
            held, exchange, _ = self._held
            if not plan.stale:
                data = dump_state({"training": held.progress().to_dict()})
            elif self._round is not None and plan.is_inherited:
                # A new worker repeats the round: it gets what the round began with, and what it has exchanged since.
                with held.as_before_round():
                    training = {**held.state().to_dict(), **self._round.progress_at_start(held).to_dict()}
                    content = {"training": training, "private": exchange.replacement_state()}
                    data = dump_state({**content, "round": self._round.state()})
            else:
                data = dump_state({"training": held.state().to_dict(), "private": exchange.replacement_state()})
        return self._session.collective.all_gather(data)[plan.source]

    def _load_checkpoint(self, state: TrainState) -> Synced:
        """Continue from the newest checkpoint, or start the run if there is none."""
        saved = self._session.checkpoints.load_newest()
        self._view = self._session.view
        # If this View ends before this worker has an exchange in it, the one of the last View must not be asked which
        # steps count: the run has gone back behind them.
        self._held = None
        if saved is None:
            state.reset()
            self._progress.begin_assignment(self._progress.assignment_from(Position()))
        else:
            state.load(saved)
            if self._has_other_data(saved):
                self._progress.begin_new_data(saved.position)
            else:
                self._progress.begin_assignment(self._progress.assignment_from(saved.position, saved.requeued))
        if self._round is not None:
            self._round.drop(self._progress.position.step)
            self._round.updates = self._progress.position.step  # a new worker has counted none of them
        place, private = self._session.place, saved.worker_states if saved is not None else []
        is_kept = place.is_leader and place.replica < len(private)
        return Synced(private[place.replica] if is_kept else None, from_checkpoint=True)

    def _has_other_data(self, saved: CheckpointState) -> bool:
        """Whether the checkpoint was written with other training data; `ConfigError` unless the user allows that."""
        plan, count = self._session.plan, self._progress.order.count
        if (saved.samples, saved.data_fingerprint) == (count, plan.data_fingerprint):
            return False
        if plan.data_changed != "ok":
            raise data_has_changed(saved.samples, count)
        return True


def _must_restart(plan: SyncPlan | None, standings: list[Standing]) -> bool:
    """Whether scripts must restart before all can continue, as all members conclude alike.

    One that goes back to a checkpoint cannot take back what it has done since; one that has ended can only train on
    requeued samples by starting again; one that holds a batch would train on it though it is assigned anew.
    """
    if plan is None:
        return any(s.in_place for s in standings)
    if not plan.merges:
        return False
    ends_early = any(s.has_ended and s.in_place for s in standings)
    return (ends_early and bool(plan.assignment.requeued)) or any(s.is_ahead and s.in_place for s in standings)
