"""The recovery suite: which step ends a recovery, what counts as a timeout, and all contenders in small real runs.

No test asserts a duration: measuring is the bench's job.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import SynclineError
from syncline.lab.bench import recovery
from syncline.lab.bench.harness import BenchSettings, measure
from syncline.lab.bench.overhead import make_workload
from syncline.lab.bench.recovery import (
    RecoveryWorkload,
    Sessions,
    TimedStep,
    complete_group,
    describe,
    read_steps,
    recovery_of,
    session,
)
from syncline.lab.bench.scripts import recovery_ddp
from syncline.lab.chaos import kills
from syncline.lab.chaos.kills import Killer, KillInterval
from syncline.lab.chaos.processes import RunProcess
from syncline.lab.chaos.score import FaultResult, Injection, Recovery, RunScore
from syncline.models import zoo
from syncline.telemetry.events import Progress, Recovered, RunStarted, WorkerFailure, WorkerReady

VICTIM = RunProcess(1, 101)


@pytest.fixture
def workload(tmp_path: Path) -> RecoveryWorkload:
    return RecoveryWorkload(make_workload(8, 4), tmp_path, workers=2)


def recovered(seconds: float | None, *, result: FaultResult = "recovered", redone: int = 0) -> Recovery:
    injection = Injection(what="kill worker 1", time=0.0, worker_id=1, pid=101, step=9)
    return Recovery(injection=injection, result=result, recovered_s=seconds, redone=redone)


# Which step ends which kill


def test_a_kill_ends_with_the_first_step_of_the_restarted_group():
    steps = [
        TimedStep(9.9, 40, 0),
        TimedStep(13.2, 31, 1),
        TimedStep(13.0, 31, 1),
        TimedStep(13.3, 32, 1),
        TimedStep(20.0, 33, 2),
    ]
    found = recovery_of(10.0, VICTIM, 0, steps, limit_s=60)
    assert found.result == "recovered"
    assert found.recovered_s == 3.0
    assert (found.injection.worker_id, found.injection.pid, found.injection.step) == (1, 101, 40)


def test_a_step_that_survivors_still_finish_is_no_recovery_and_has_to_be_redone():
    steps = [TimedStep(9.9, 40, 0), TimedStep(10.1, 41, 0), TimedStep(13.0, 31, 1)]
    found = recovery_of(10.0, VICTIM, 0, steps, limit_s=60)
    assert found.recovered_s == 3.0
    assert found.redone == 41 - 30


def test_a_group_that_never_completed_a_step_is_skipped():
    found = recovery_of(10.0, VICTIM, 3, [TimedStep(9.0, 40, 3), TimedStep(25.0, 41, 6)], limit_s=60)
    assert (found.result, found.recovered_s, found.redone) == ("recovered", 15.0, 0)


@pytest.mark.parametrize(("steps", "result"), [([], "fatal"), ([TimedStep(70.5, 1, 1)], "hang")])
def test_a_recovery_beyond_the_limit_counts_as_the_limit(steps: list[TimedStep], result: FaultResult):
    found = recovery_of(10.0, VICTIM, 0, steps, limit_s=60, otherwise="fatal")
    assert found.result == result
    assert recovery.seconds_of(found, limit_s=60) == 60


@given(st.lists(st.builds(TimedStep, st.floats(0, 100), st.integers(1, 50), st.integers(0, 5))), st.integers(0, 5))
def test_only_a_later_group_can_complete_a_recovery(steps: list[TimedStep], restarts: int):
    found = recovery_of(0.0, VICTIM, restarts, steps, limit_s=50)
    later = [s for s in steps if s.restarts > restarts]
    assert 0 <= recovery.seconds_of(found, limit_s=50) <= 50
    assert found.recovered_s == min((s.time for s in later), default=None)
    assert found.redone <= max((s.number for s in steps if s.restarts <= restarts), default=0)


def test_steps_are_read_as_far_as_they_were_written(tmp_path: Path):
    (tmp_path / "0-0-100").write_text("1.5 1\n2.5 2\n3.")
    (tmp_path / "2-1-101").write_text("7.25 2\n")
    (tmp_path / "2-0-102").write_text("")
    assert sorted(read_steps(tmp_path)) == [TimedStep(1.5, 1, 0), TimedStep(2.5, 2, 0), TimedStep(7.25, 2, 2)]


def test_a_group_is_complete_when_each_process_has_done_a_step(tmp_path: Path):
    for name in ("0-1-101", "0-0-100", "1-0-102"):
        (tmp_path / name).write_text("1.0 1\n")
    (tmp_path / "1-1-103").touch()
    assert complete_group(tmp_path, 2, after=-1) == (0, [RunProcess(0, 100), RunProcess(1, 101)])
    assert complete_group(tmp_path, 2, after=0) == (0, [])
    (tmp_path / "1-1-103").write_text("2.0 1\n")
    assert complete_group(tmp_path, 2, after=-1) == complete_group(tmp_path, 2, after=0)
    assert complete_group(tmp_path, 2, after=0) == (1, [RunProcess(0, 102), RunProcess(1, 103)])


# Sessions


class Scripted:
    """Simulated jobs: each survives as many kills as the script says."""

    def __init__(self, *script: tuple[int, Recovery] | Exception) -> None:
        self.script, self.asked = list(script), list[tuple[int, str]]()

    def __call__(self, workload: RecoveryWorkload, kills: int, seed: str) -> Sequence[Recovery]:
        self.asked.append((kills, seed))
        if not self.script:
            return [recovered(0.1)] * kills
        now = self.script.pop(0)
        if isinstance(now, Exception):
            raise now
        return [recovered(0.1)] * (now[0] - 1) + [now[1]]


def test_after_a_fatal_kill_a_new_job_gets_the_remaining_kills(workload: RecoveryWorkload):
    attempt = Scripted((3, recovered(None, result="hang")), (1, recovered(None, result="fatal")))
    found = session(attempt, workload, 6, "s")
    assert [r.result for r in found] == ["recovered", "recovered", "hang", "fatal", "recovered", "recovered"]
    assert attempt.asked == [(6, "s 0"), (3, "s 3"), (2, "s 4")], "with another seed"


def test_the_warm_up_is_one_kill_that_does_not_count(workload: RecoveryWorkload):
    attempt = Scripted((1, recovered(9.0)))
    sessions = Sessions(attempt, workload, 3)
    assert sessions.measure() == 9.0
    assert sessions.recoveries == []
    assert sessions.measure() == 0.1
    assert [kills for kills, _ in attempt.asked] == [1, 3]
    assert len(sessions.recoveries) == 3


def test_a_session_runs_once_for_both_figures_and_a_failed_one_fails_again(workload: RecoveryWorkload):
    attempt = Scripted((1, recovered(0.1)), SynclineError("no such port"), (3, recovered(2.1)))
    sessions = Sessions(attempt, workload, 3)
    sessions.measure()
    with pytest.raises(SynclineError):
        sessions.measure()
    assert sessions.measure() == 0.1
    again = sessions.again(0.95)
    assert again() == 0.1
    with pytest.raises(SynclineError, match="no such port"):
        again()
    assert again() == pytest.approx(1.9)
    assert len(attempt.asked) == 3


def test_both_suites_use_the_same_sessions_and_all_kills_are_summarized(monkeypatch, capsys):
    torchrun, syncline = Scripted(), Scripted((1, recovered(0.1)), (1, recovered(None, result="hang")))
    monkeypatch.setattr(recovery, "in_an_own_loop", Scripted())
    monkeypatch.setattr(recovery, "calibrate", lambda target_ms: 2)
    monkeypatch.setattr(recovery, "_KILLS", 2)
    monkeypatch.setattr(recovery, "under_torchrun", torchrun)
    monkeypatch.setattr(recovery, "under_syncline", syncline)
    said: list[str] = []
    made = recovery.suites(BenchSettings(say=said.append))
    first = next(made)
    medians = measure(first, 2)
    second = next(made)
    p95 = measure(second, 2)
    assert (first.name, second.name) == ("recovery", "recovery-p95")
    assert medians.outcomes["syncline"].values == [pytest.approx(30.05), 0.1]
    assert p95.outcomes["syncline"].values == [pytest.approx(0.1 + 0.95 * 59.9), 0.1]
    assert medians.outcomes["torchrun, DDP"].values == p95.outcomes["torchrun, DDP"].values == [0.1, 0.1]
    assert [seed for _, seed in torchrun.asked] == ["0 0 0", "0 1 0", "0 2 0"], "the second suite runs no jobs"
    assert "torchrun, DDP: p50 100 ms, p95 100 ms, max 100 ms (4 times)" in said[-3]
    assert "not recovered: 0;" in said[-3]
    assert "syncline: p50 100 ms, p95 51 s, max 1 min 00 s (4 times)" in said[-2]
    assert "not recovered: 1 (counted as 60 s)" in said[-2]
    assert "syncline, own loop: p50 100 ms" in said[-1]
    assert list(made) == []


def test_a_quick_bench_has_one_kill_per_session_and_no_warm_up_or_percentiles(monkeypatch):
    torchrun, syncline, own_loop = Scripted(), Scripted(), Scripted()
    monkeypatch.setattr(recovery, "calibrate", lambda target_ms: 2)
    monkeypatch.setattr(recovery, "in_an_own_loop", own_loop)
    monkeypatch.setattr(recovery, "under_torchrun", torchrun)
    monkeypatch.setattr(recovery, "under_syncline", syncline)
    names = []
    for suite in recovery.suites(BenchSettings(quick=True)):
        names.append(suite.name)
        measure(suite, 2)
    assert names == ["recovery"]
    assert torchrun.asked == syncline.asked == own_loop.asked == [(1, "0 1 0"), (1, "0 2 0")]


def test_the_summary_adds_up_redone_steps():
    text = describe("torchrun", [recovered(4.0, redone=700), recovered(5.0, redone=800)], limit_s=60)
    assert "1,500" in text


# Killing at full size


def test_at_full_size_the_killer_waits_for_the_replacement(tmp_path: Path, monkeypatch):
    killed: list[int] = []
    monkeypatch.setattr(kills, "zygote_of", lambda _: 1)
    monkeypatch.setattr(kills, "processes_of", lambda *_: [RunProcess(n, 100 + n) for n in range(3)])
    monkeypatch.setattr(kills, "send", lambda pid, *_, **__: killed.append(pid) or True)
    killer = Killer(KillInterval(seconds=0.01), most=2, seed="a", only_at_full_size=True)
    try:
        plan = {"workers": [{}] * 3, "servers": 0}
        killer.on_event(RunStarted(run_dir=str(tmp_path), plan=plan, machine={}))
        for rank in range(3):
            killer.on_event(WorkerReady(worker_id=rank, pid=100 + rank, parameters=1, collective="Solo"))
        killer.on_event(Progress(worker_id=0, epoch=0, step=1, samples=1, seconds=1.0, cursor=0))
        deadline = time.monotonic() + 10
        while not killed and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        killer._thread.join(0.2)
        assert len(killed) == 1
        killer.on_event(
            WorkerFailure(worker_id=1, name="worker 1", cause="was killed", step=1, workers=2, is_replaced=True)
        )
        killer.on_event(Recovered(view=2, members=[0, 2], step=2))
        killer._thread.join(0.2)
        assert len(killed) == 1, "one worker is missing"
        killer.on_event(Recovered(view=3, members=[0, 2, 1], step=9))
        killer._thread.join(10)
        assert len(killed) == 2
    finally:
        killer.close()


# Real runs


def test_both_contenders_train_the_same_model():
    ours, theirs = zoo.build("mlp", (784,), 10), recovery_ddp.mlp()
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]


@pytest.mark.slow
def test_a_syncline_run_recovers_from_a_kill(workload: RecoveryWorkload):
    (found,) = session(recovery.under_syncline, workload, 1, "a")
    assert found.result == "recovered"
    assert list(workload.folder.iterdir()) == []


@pytest.mark.slow
def test_a_loop_of_ones_own_recovers_from_kills_one_after_the_other(workload: RecoveryWorkload):
    """The second kill waits until the replacement trains, although an epoch of this workload lasts milliseconds."""
    found = session(recovery.in_an_own_loop, workload, 2, "a")
    assert [one.result for one in found] == ["recovered", "recovered"]
    assert [path.name for path in workload.folder.iterdir()] == ["samples.pt"]


@pytest.mark.slow
def test_a_torchrun_job_recovers_from_a_kill(workload: RecoveryWorkload):
    (found,) = session(recovery.under_torchrun, workload, 1, "a")
    assert found.result == "recovered"
    assert 0 <= found.redone <= found.injection.step
    assert [path.name for path in workload.folder.iterdir()] == ["samples.pt"]
    assert _using(workload.folder) == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_torchrun_processes(workload: RecoveryWorkload, monkeypatch):
    def press_ctrl_c(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery, "choose_victim", press_ctrl_c)  # called when all workers train
    with pytest.raises(KeyboardInterrupt):
        recovery.under_torchrun(workload, 1, "a")
    assert [path.name for path in workload.folder.iterdir()] == ["samples.pt"]
    assert _using(workload.folder) == []


def test_the_output_of_a_torchrun_job_that_cannot_start_is_quoted(workload: RecoveryWorkload, monkeypatch):
    monkeypatch.setattr(recovery, "_DDP", Path("no_such_script.py"))
    monkeypatch.setattr(recovery, "_UNLIMITED", 0)
    with pytest.raises(SynclineError, match=r"(?s)torchrun.*no_such_script.py"):
        recovery.under_torchrun(workload, 1, "a")


def test_ctrl_c_is_not_lost_in_a_run_that_is_about_to_end(workload: RecoveryWorkload, monkeypatch):
    def run_with_faults(*_: object, **__: object) -> tuple[RunScore, KeyboardInterrupt]:
        before = signal.signal(signal.SIGINT, lambda *_: None)  # as the coordinator does
        os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        score = RunScore(strategy="allreduce", seed=0, outcome="interrupted", seconds=1, recoveries=(recovered(0.1),))
        return score, recovery._Enough()

    monkeypatch.setattr(recovery, "run_with_faults", run_with_faults)
    with pytest.raises(KeyboardInterrupt):
        recovery.under_syncline(workload, 1, "a")


def _using(folder: Path) -> list[str]:
    """The processes that were started with this folder in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue  # gone in the meantime
    return found
