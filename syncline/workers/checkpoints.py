"""A worker's checkpoints: when to save, saving together with the others, and loading the newest one.

Here: `Checkpoints`. Rank 0 writes; all members take part in saving and loading. Not here: what a checkpoint holds
(`checkpoint/schema.py`), files (`checkpoint/store.py`), and writing in the background (`checkpoint/writer.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncline.checkpoint import store
from syncline.checkpoint.schema import CheckpointState, TrainingProgress
from syncline.checkpoint.snapshot import copied
from syncline.checkpoint.writer import CheckpointWriter
from syncline.comms.serialize import dump_state, load_state
from syncline.config.owned_files import make_directory
from syncline.data.assignment import Position, Range
from syncline.errors import CheckpointError, ConfigError
from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.events import CheckpointSaved, WarningMessage
from syncline.workers.train_state import TrainState

if TYPE_CHECKING:
    from syncline.workers.session import Session


class Checkpoints:
    """The checkpoints of `session`; a resumed run starts from the one at `resume_from`."""

    def __init__(self, session: Session, resume_from: str | None) -> None:
        self._session = session
        self._resume_from = Path(resume_from) if resume_from else None
        self._writer: CheckpointWriter | None = None
        self._last_save_s = time.monotonic()
        self._last_saved_step = 0

    def open(self) -> None:
        """Start the writer on rank 0, for as long as the View lasts."""
        run_dir = self._session.run_dir
        if self._session.rank == 0 and run_dir is not None:
            self._writer = self._new_writer(run_dir.checkpoints)
            self._session.until_view_ends.callback(self._close)

    def _new_writer(self, folder: Path) -> CheckpointWriter:
        keep = self._session.plan.keep_checkpoints
        return CheckpointWriter(folder, keep=keep, on_saved=self._report_saved, on_failed=self._report_failed)

    def _close(self) -> None:
        self.finish_writing()
        self._writer = None

    def finish_writing(self) -> None:
        """Wait for the checkpoint that is being written: it may be the one that the run resumes from."""
        if self._writer is not None:
            self._writer.close()

    def is_due(self) -> bool:
        """Whether it is time to save. True on rank 0 only, and only if it could write at once."""
        if self._writer is None or not self._writer.is_idle:
            return False
        plan = self._session.plan
        every = plan.checkpoint_every_steps
        steps = self._session.in_flight[0] + 1 - self._last_saved_step
        return (every is not None and steps >= every) or (
            time.monotonic() - self._last_save_s >= plan.checkpoint_every_s
        )

    def save(
        self,
        position: Position,
        requeued: tuple[Range, ...],
        samples: int,
        state: TrainState,
        replica: Replica,
        exchange: Exchange,
        *,
        is_last: bool,
    ) -> None:
        """Save everything that is needed to resume exactly here; all members call this at the same step.

        The state that the members have in common is rank 0's; what each strategy keeps for itself is gathered there.
        """
        session = self._session
        with exchange.shared(), replica.log.outside():
            mine = exchange.private_state(), session.ledger_lines.texts(time.monotonic())
            gathered = [load_state(part) for part in session.collective.all_gather(dump_state(mine))]
            self._last_save_s, self._last_saved_step = time.monotonic(), position.step
            if self._writer is None:
                return
            saved = CheckpointState(
                **state.state().to_dict(),
                position=position,
                requeued=requeued,
                worker_states=[private for private, _ in gathered if private is not None],
                ledger=[line for _, lines in gathered for line in lines],
                **self._origin(samples),
            )
            if is_last:
                assert session.run_dir is not None, "a writer writes there"
                with _one_at_a_time(session.run_dir.checkpoints):  # others may give up waiting, and save alone
                    self._writer.save_last(position.step, saved.to_dict())
            else:
                self._writer.save_if_idle(position.step, saved.to_dict())

    def save_arrays(
        self, step: int, arrays: dict[str, torch.Tensor], numbers: dict[str, float], *, is_last: bool
    ) -> None:
        """Save the state of a computation without samples, on rank 0; the other members need not call this."""
        self._last_save_s, self._last_saved_step = time.monotonic(), step
        if self._writer is None:
            return
        saved = CheckpointState(
            schedulers=[], learning_rates=[], metrics=numbers, epochs_closed=0, evaluated_at=-1, tuning=None,
            script=None, model=arrays, optimizer={}, position=Position(0, 0, step), requeued=(), worker_states=[],
            ledger=[], **self._origin(0),
        )  # fmt: skip
        if is_last:
            self._writer.save_last(step, saved.to_dict())
        else:
            self._writer.save_if_idle(step, saved.to_dict())

    def save_alone(
        self,
        position: Position,
        requeued: tuple[Range, ...],
        samples: int,
        state: TrainState,
        exchange: Exchange,
        *,
        rank: int,
        size: int,
        progress: TrainingProgress | None = None,
    ) -> None:
        """Save without the other members what this one, `rank` of `size`, holds after its last completed step.

        `progress` is that of the state then, if it has advanced since.
        Several members may do so, after the same step or the next: one writes at a time, and a step that another has
        saved is not written again. They differ in their ledger lines only.
        """
        session = self._session
        if session.run_dir is None:
            return
        state.undo_step()
        private = [exchange.private_state() if r == rank else exchange.replacement_state() for r in range(size)]
        saved = CheckpointState(
            **{**state.state().to_dict(), **(progress.to_dict() if progress is not None else {})},
            position=position,
            requeued=requeued,
            worker_states=[part for part in private if part is not None],
            ledger=session.ledger_lines.texts(time.monotonic()),
            **self._origin(samples),
        )
        folder = session.run_dir.checkpoints
        with _one_at_a_time(folder):
            for other in store.checkpoints_in(folder):
                with contextlib.suppress(CheckpointError):
                    if other.step == position.step and store.load(other):
                        return
            self._new_writer(folder).save_last(position.step, saved.to_dict())

    def _origin(self, samples: int) -> dict[str, Any]:
        """The run and the data that a checkpoint belongs to."""
        plan = self._session.plan
        return {"run_id": plan.run_id, "samples": samples, "data_fingerprint": plan.data_fingerprint}

    def load_newest(self) -> CheckpointState | None:
        """The checkpoint to continue from, if there is one; all members call this together.

        Rank 0 decides which. Members that have the same file read it; if one does not, because hosts share no files,
        rank 0 sends the contents to all.
        """
        session = self._session
        mine = self._newest_here() if session.rank == 0 else None
        chosen = session.collective.all_gather(mine.sha256.encode() if mine is not None else b"")[0].decode()
        if not chosen:
            return None
        if mine is None and session.run_dir is not None:
            mine = next((c for c in store.checkpoints_in(session.run_dir.checkpoints) if c.sha256 == chosen), None)
        all_have_it = all(session.collective.all_gather(b"yes" if mine is not None else b""))
        loaded = store.load(mine) if mine is not None and (all_have_it or session.rank == 0) else {}
        if not all_have_it:
            loaded = load_state(session.collective.all_gather(dump_state(loaded) if session.rank == 0 else b"")[0])
        # Loading a model copies its tensors. The rest may be kept as it is, and must not depend on the file.
        state = CheckpointState.from_dict({k: v if k == "model" else copied(v) for k, v in loaded.items()})
        self._last_saved_step = state.position.step
        return state

    def _newest_here(self) -> store.Checkpoint | None:
        path = self._resume_from
        if self._session.view > 1 and self._session.run_dir is not None:
            with contextlib.suppress(CheckpointError):
                path = store.newest_sound(self._session.run_dir.checkpoints, self._session.plan.run_id)[0].path
        if path is None:
            return None
        found = next((c for c in store.checkpoints_in(path.parent) if c.path == path), None)
        if found is None:
            raise CheckpointError(f"The checkpoint {path} was deleted.", code="checkpoint-missing", path=str(path))
        return found

    def _report_saved(self, saved: store.Checkpoint, seconds: float) -> None:
        self._session.recorder.emit(
            CheckpointSaved(step=saved.step, path=str(saved.path), bytes=saved.size_bytes, seconds=seconds)
        )

    def _report_failed(self, error: CheckpointError) -> None:
        self._session.recorder.emit(WarningMessage(message=f"{error} Training continues."))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Exclude other processes that do the same; the kernel releases the lock of one that is killed."""
    descriptor: int | None = None
    # Some network drives cannot lock a folder; saving reports other problems.
    with contextlib.suppress(OSError, ConfigError):
        make_directory(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
