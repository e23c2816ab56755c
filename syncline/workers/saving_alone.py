"""Saving what one worker holds, without the others: they are gone, or the scripts are out of step.

Here: `SavingAlone`, which decides whether that state is one from which all workers can resume. Not here: writing it
(`checkpoints.py`), and checkpoints that all workers save together (`stepper.py`).
"""

from __future__ import annotations

from syncline.checkpoint.schema import TrainingProgress
from syncline.workers.data_progress import DataProgress
from syncline.workers.rounds import LoopRound
from syncline.workers.session import Session
from syncline.workers.state_sync import HeldState, StateSync


class SavingAlone:
    """One worker's last resort; `round` is that of a user's own loop."""

    def __init__(self, session: Session, progress: DataProgress, sync: StateSync, round: LoopRound | None) -> None:
        self._session, self._progress, self._sync, self._round = session, progress, sync, round

    def save(self) -> None:
        """Save what this worker holds without the others, if that is complete: the driver and another worker are gone.

        Replicas that are equal after every step have the samples of all workers, also of those that could not report
        them; the audit counts such samples as confirmed.
        """
        held = self._sync.complete_state()
        if held is not None:
            self._progress.report_used()
            self._save(held)

    def save_round_start(self) -> None:
        """Save without the others what the round in progress began with, if that is what all of them hold.

        For a run that ends because the scripts of its workers do different things: nothing of that is in the state. A
        worker that has skipped a batch, or made one of several updates, since the last step leaves it to the others.
        """
        round, held, progress = self._round, self._sync.equal_state(), self._progress
        progress.report_used()
        step = progress.position.step
        if round is None or held is None or not 0 < step == progress.updated_at == round.start:
            return
        if progress.inherited_at in (None, step) and held.exchange.private_state() is None:
            self._save(held, round.progress_at_start(held.state))

    def _save(self, held: HeldState, training_progress: TrainingProgress | None = None) -> None:
        progress = self._progress
        self._session.checkpoints.save_alone(
            progress.position,
            progress.remaining().requeued,
            progress.order.count,
            held.state,
            held.exchange,
            rank=held.rank,
            size=progress.assignment.size,
            progress=training_progress,
        )
