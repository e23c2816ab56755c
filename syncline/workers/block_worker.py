"""A fit by blocks on one worker: rounds, checkpoints, and going on after another worker has failed.

Here: `run_fit` for a worker of a run, `FitRun`, which a fit in the driver's own process uses, too, and reading what a
fit has found. All workers hold the same state, so a checkpoint is what rank 0 has, and a worker that joins or was
slower gets the state of the one that is furthest. Not here: the rounds (`blocks/loop.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from syncline.blocks.app import Arrays
from syncline.blocks.fit_task import BlockFit
from syncline.blocks.loop import Fitting, Status, Team, pack, unpack
from syncline.checkpoint import store
from syncline.checkpoint.schema import CheckpointState
from syncline.comms.collective import Collective
from syncline.config.owned_files import replace_file
from syncline.data.assignment import Position
from syncline.errors import PeerFailed
from syncline.planning.plan import Plan
from syncline.telemetry.events import CheckpointSaved, MetricsLogged, Recovered, WorkerReady
from syncline.telemetry.recorder import Recorder
from syncline.telemetry.run_dir import RunDir
from syncline.workers.session import Session
from syncline.workers.stepper import begin_round

RESULT = "result.npz"
"""The file of a run directory with what a fit has found."""
_LOG_EVERY_S = 0.25


class FitRun:
    """One fit, saved in a run directory."""

    def __init__(
        self, fit: BlockFit, plan: Plan, run_dir: RunDir, recorder: Recorder, *,
        before_saving: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`before_saving` is called before each checkpoint that a run may be resumed from."""
        self._before_saving = before_saving
        self.fit, self._plan, self._run_dir, self._recorder = fit, plan, run_dir, recorder
        self._saved_s, self._saved_round, self._logged_s = time.monotonic(), 0, 0.0
        self.fitting: Fitting | None = None
        self.last: Status | None = None
        """The last survey."""

    def loaded(self, checkpoint: Path | None) -> Fitting:
        """The fit as a checkpoint has it, or from its beginning."""
        return Fitting(self.fit, None if checkpoint is None else read_state(checkpoint))

    def rounds(
        self, fitting: Fitting, team: Team, *, saves: bool, before: Callable[[int], None],
        wants_stop: Callable[[], bool],
    ) -> bool:  # fmt: skip
        """Rounds until the fit has converged or is at its limit. True if a stop was requested before."""
        self.fitting, recorder = fitting, self._recorder
        recorder.start()
        while True:
            before(fitting.round + 1)
            status = fitting.step(team)
            recorder.mark("forward")
            if status is not None:
                self.last = status
                self._log(status)
                if status.has_converged or (fitting.is_at_limit and fitting.surveyed_at == fitting.round):
                    self._flush(fitting)
                    return False
            else:
                recorder.step(Position(step=fitting.round), 0, 0, None, None, 0.0)
            if wants_stop():
                self._flush(fitting)
                return True
            if saves and self._is_due(fitting.round):
                self.save(fitting)

    def _is_due(self, number: int) -> bool:
        every = self._plan.checkpoint_every_steps
        return (every is not None and number - self._saved_round >= every) or (
            time.monotonic() - self._saved_s >= self._plan.checkpoint_every_s
        )

    def save(self, fitting: Fitting, *, is_resumed: bool = True) -> None:
        """Write a checkpoint."""
        if is_resumed:
            self._before_saving()
        started = time.monotonic()
        state = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in fitting.saved().items()}
        shapes = {name: list(array.shape) for name, array in fitting.saved().items()}
        saved = CheckpointState(
            model=state, optimizer={"shapes": shapes}, schedulers=[], learning_rates=[], metrics=metrics_of(self.last),
            epochs_closed=0, evaluated_at=-1, tuning=None, script=None, position=Position(step=fitting.round),
            requeued=(), worker_states=[], ledger=[], run_id=self._plan.run_id, samples=0,
            data_fingerprint=self._plan.data_fingerprint,
        )  # fmt: skip
        made = store.save(self._run_dir.checkpoints, fitting.round, saved.to_dict(), keep=self._plan.keep_checkpoints)
        self._saved_s, self._saved_round = time.monotonic(), fitting.round
        self._recorder.emit(
            CheckpointSaved(step=made.step, path=str(made.path), bytes=made.size_bytes, seconds=self._saved_s - started)
        )

    def finish(self, fitting: Fitting, *, keeps_task: bool = True) -> None:
        """Save the state, and what was found."""
        self.save(fitting, is_resumed=keeps_task)
        write_result(self._run_dir.path / RESULT, self.fit.app.result(self.fit.problem, fitting.state))

    def summary(self, peak_memory: dict[str, int]) -> dict[str, Any]:
        """What the driver shows at the end."""
        assert self.fitting is not None, "there were rounds"
        return {
            "metrics": metrics_of(self.last), "steps": self.fitting.round, "epochs": 0.0, "samples": 0,
            "seconds": self._recorder.total_seconds, "peak_memory_bytes": peak_memory,
        }  # fmt: skip

    def _log(self, status: Status) -> None:
        now = time.monotonic()
        if status.has_converged or now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            if self._recorder.worker_id == 0 or status.has_converged:
                self._recorder.emit(
                    MetricsLogged(worker_id=self._recorder.worker_id, step=status.round, metrics=metrics_of(status))
                )

    def _flush(self, fitting: Fitting) -> None:
        self._recorder.flush(Position(step=fitting.round), 0.0)


def run_fit(fit: BlockFit, session: Session) -> tuple[bool, dict[str, Any]]:
    """Take part in a fit until its end: whether it was stopped early, and the summary."""
    assert session.run_dir is not None, "the coordinator has started this worker"
    assert session.link is not None, "the coordinator has started this worker"
    run = FitRun(fit, session.plan, session.run_dir, session.recorder)
    resume_from = session.link.files.checkpoint_path
    stopped_early: bool | None = None

    while session.join_view():
        team = _SessionTeam(session)
        recovery = _Recovery(session)

        def before(number: int, recovery: _Recovery = recovery) -> None:
            begin_round(session, number)
            recovery.report(number - 1)

        try:
            fitting = _agreed(run, session.collective, Path(resume_from) if resume_from else None)
            session.recorder.emit(
                WorkerReady(
                    worker_id=session.worker_id, pid=os.getpid(), parameters=fit.app.count(fit.problem),
                    collective=type(session.collective).__name__,
                )
            )  # fmt: skip
            recovery.begins_at(fitting.round)
            stopped_early = run.rounds(
                fitting, team, saves=session.rank == 0, before=before, wants_stop=team.wants_stop
            )  # fmt: skip
            if session.rank == 0:
                (run.save if stopped_early else run.finish)(fitting)
            peak_memory = session.gather_peak_memory()
            session.collective.barrier()  # no worker leaves before the checkpoint is on disk
        except PeerFailed:
            continue  # the coordinator decides how to continue, and announces a new View
        session.close()
        return stopped_early, run.summary(peak_memory)
    return False, {}  # this worker is no longer a member


class _SessionTeam:
    """The members of a View. A request to stop travels with what they exchange, so that all stop at the same round."""

    def __init__(self, session: Session) -> None:
        self._session, self._collective = session, session.collective
        self.rank, self.size = session.rank, len(session.members)
        self._is_stopping = False

    def wants_stop(self) -> bool:
        """Whether all members stop after this round."""
        return self._is_stopping if self.size > 1 else self._session.stop_requested()

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every worker's payload."""
        flag = b"\x01" if self._session.stop_requested() else b"\x00"
        gathered = self._collective.all_gather(flag + payload)
        self._is_stopping = any(part[0] for part in gathered)
        return [part[1:] for part in gathered]


class _Recovery:
    """Reports that the members of a later View have done their first round."""

    def __init__(self, session: Session) -> None:
        self._session, self._first = session, -1

    def begins_at(self, number: int) -> None:
        self._first = number if self._session.view > 1 else -1

    def report(self, rounds: int) -> None:
        """Called with the number of rounds that are done."""
        if not 0 <= self._first < rounds:
            return
        self._first, session = -1, self._session
        if session.rank == 0:
            seconds = time.monotonic() - session.interrupted_at
            session.recorder.emit(Recovered(view=session.view, members=session.members, step=rounds, seconds=seconds))


def _agreed(run: FitRun, collective: Collective, checkpoint: Path | None) -> Fitting:
    """The fit with the state of the member that is furthest; all members of a View call this together."""
    mine = run.fitting
    if collective.size == 1:
        return mine if mine is not None else run.loaded(checkpoint)
    progress = -1 if mine is None else mine.round + mine.surveys
    known = [int(text) for text in collective.all_gather(str(progress).encode())]
    if max(known) < 0:
        return run.loaded(checkpoint)
    source = known.index(max(known))
    is_source = collective.rank == source
    # Only those that are behind unpack it, but all take part.
    needed = min(known) < max(known)
    sent = collective.all_gather(pack([mine.saved()]) if is_source and needed and mine is not None else b"")[source]
    if progress == known[source]:
        assert mine is not None, "it has made progress"
        return mine
    return Fitting(run.fit, unpack(sent)[0])


def metrics_of(status: Status | None) -> dict[str, float]:
    """What is shown of a survey."""
    if status is None:
        return {}
    verdict = status.verdict
    return {"objective": verdict.objective, "gap": verdict.gap, **verdict.metrics}


def read_state(checkpoint: Path) -> Arrays:
    """The state in a checkpoint of a fit."""
    found = next(c for c in store.checkpoints_in(checkpoint.parent) if c.path == checkpoint)
    loaded = store.load(found)
    shapes = loaded["optimizer"]["shapes"]
    return {name: np.array(tensor.numpy()).reshape(shapes[name]) for name, tensor in loaded["model"].items()}


def write_result(path: Path, result: Arrays) -> None:
    """Save arrays by name."""
    import io

    buffer = io.BytesIO()
    np.savez(buffer, **result)  # type: ignore[arg-type]  # arrays by name
    replace_file(path, buffer.getvalue())
