"""The recovery suite: which step ends which kill, what counts as never, and both contenders for real, in miniature.

Nothing here looks at how long anything took: that is what the bench itself is for.
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

from syncline import zoo
from syncline.bench import recovery
from syncline.bench.harness import Settings, measure
from syncline.bench.overhead import make_workload
from syncline.bench.recovery import Job, Sessions, Step, in_words, read_steps, recovery_of, session, whole_group
from syncline.bench.scripts import recovery_ddp
from syncline.chaos import kills
from syncline.chaos.kills import Killer, Rhythm
from syncline.chaos.processes import Process
from syncline.chaos.score import Blow, Came, Recovery, RunScore
from syncline.errors import SynclineError
from syncline.telemetry.events import Progress, RunStarted, WentOn, WorkerLost, WorkerReady

VICTIM = Process(1, 101)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(make_workload(8, 4), tmp_path, workers=2)


def settled(seconds: float | None, *, came: Came = "recovered", redone: int = 0) -> Recovery:
    blow = Blow(what="kill worker 1", time=0.0, number=1, pid=101, step=9)
    return Recovery(blow=blow, came=came, went_on_s=seconds, redone=redone)


# Which step ends which kill


def test_a_kill_ends_with_the_first_step_of_the_restarted_group():
    steps = [Step(9.9, 40, 0), Step(13.2, 31, 1), Step(13.0, 31, 1), Step(13.3, 32, 1), Step(20.0, 33, 2)]
    found = recovery_of(10.0, VICTIM, 0, steps, limit_s=60)
    assert found.came == "recovered"
    assert found.went_on_s == 3.0
    assert (found.blow.number, found.blow.pid, found.blow.step) == (1, 101, 40)


def test_a_step_that_survivors_still_finish_is_no_recovery_but_is_lost_like_the_others():
    steps = [Step(9.9, 40, 0), Step(10.1, 41, 0), Step(13.0, 31, 1)]
    found = recovery_of(10.0, VICTIM, 0, steps, limit_s=60)
    assert found.went_on_s == 3.0
    assert found.redone == 41 - 30


def test_a_group_that_was_started_in_vain_is_passed_over():
    found = recovery_of(10.0, VICTIM, 3, [Step(9.0, 40, 3), Step(25.0, 41, 6)], limit_s=60)
    assert (found.came, found.went_on_s, found.redone) == ("recovered", 15.0, 0)


@pytest.mark.parametrize(("steps", "came"), [([], "fatal"), ([Step(70.5, 1, 1)], "hang")])
def test_what_takes_longer_than_the_limit_counts_as_the_limit(steps: list[Step], came: Came):
    found = recovery_of(10.0, VICTIM, 0, steps, limit_s=60, otherwise="fatal")
    assert found.came == came
    assert recovery.seconds_of(found, limit_s=60) == 60


@given(st.lists(st.builds(Step, st.floats(0, 100), st.integers(1, 50), st.integers(0, 5))), st.integers(0, 5))
def test_no_recovery_is_told_that_no_later_group_has_made(steps: list[Step], restarts: int):
    found = recovery_of(0.0, VICTIM, restarts, steps, limit_s=50)
    later = [s for s in steps if s.restarts > restarts]
    assert 0 <= recovery.seconds_of(found, limit_s=50) <= 50
    assert found.went_on_s == min((s.time for s in later), default=None)
    assert found.redone <= max((s.number for s in steps if s.restarts <= restarts), default=0)


def test_steps_are_read_as_far_as_they_were_written(tmp_path: Path):
    (tmp_path / "0-0-100").write_text("1.5 1\n2.5 2\n3.")
    (tmp_path / "2-1-101").write_text("7.25 2\n")
    (tmp_path / "2-0-102").write_text("")
    assert sorted(read_steps(tmp_path)) == [Step(1.5, 1, 0), Step(2.5, 2, 0), Step(7.25, 2, 2)]


def test_a_group_is_whole_when_each_of_its_processes_has_done_a_step(tmp_path: Path):
    for name in ("0-1-101", "0-0-100", "1-0-102"):
        (tmp_path / name).write_text("1.0 1\n")
    (tmp_path / "1-1-103").touch()
    assert whole_group(tmp_path, 2, after=-1) == (0, [Process(0, 100), Process(1, 101)])
    assert whole_group(tmp_path, 2, after=0) == (0, [])
    (tmp_path / "1-1-103").write_text("2.0 1\n")
    assert whole_group(tmp_path, 2, after=-1) == whole_group(tmp_path, 2, after=0)
    assert whole_group(tmp_path, 2, after=0) == (1, [Process(0, 102), Process(1, 103)])


# Sessions


class Scripted:
    """Jobs that take no time; each comes to as many kills as the script says, and the last kill of it to the rest."""

    def __init__(self, *script: tuple[int, Recovery] | Exception) -> None:
        self.script, self.asked = list(script), list[tuple[int, str]]()

    def __call__(self, job: Job, kills: int, seed: str) -> Sequence[Recovery]:
        self.asked.append((kills, seed))
        if not self.script:
            return [settled(0.1)] * kills
        now = self.script.pop(0)
        if isinstance(now, Exception):
            raise now
        return [settled(0.1)] * (now[0] - 1) + [now[1]]


def test_after_a_kill_that_a_job_does_not_survive_another_job_gets_the_rest(job: Job):
    attempt = Scripted((3, settled(None, came="hang")), (1, settled(None, came="fatal")))
    found = session(attempt, job, 6, "s")
    assert [r.came for r in found] == ["recovered", "recovered", "hang", "fatal", "recovered", "recovered"]
    assert attempt.asked == [(6, "s 0"), (3, "s 3"), (2, "s 4")], "and it draws other lots"


def test_the_warm_up_is_one_kill_of_which_nothing_is_made(job: Job):
    attempt = Scripted((1, settled(9.0)))
    sessions = Sessions(attempt, job, 3)
    assert sessions.measure() == 9.0
    assert sessions.settled == []
    assert sessions.measure() == 0.1
    assert [kills for kills, _ in attempt.asked] == [1, 3]
    assert len(sessions.settled) == 3


def test_a_session_is_held_once_for_both_figures_and_one_that_failed_fails_again(job: Job):
    attempt = Scripted((1, settled(0.1)), SynclineError("no such port"), (3, settled(2.1)))
    sessions = Sessions(attempt, job, 3)
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


def test_both_suites_are_made_of_the_same_sessions_and_all_kills_are_told_in_a_line(monkeypatch, capsys):
    torchrun, syncline = Scripted(), Scripted((1, settled(0.1)), (1, settled(None, came="hang")))
    monkeypatch.setattr(recovery, "calibrate", lambda target_ms: 2)
    monkeypatch.setattr(recovery, "_KILLS", 2)
    monkeypatch.setattr(recovery, "under_torchrun", torchrun)
    monkeypatch.setattr(recovery, "under_syncline", syncline)
    said: list[str] = []
    made = recovery.suites(Settings(say=said.append))
    first = next(made)
    medians = measure(first, 2)
    second = next(made)
    p95 = measure(second, 2)
    assert (first.name, second.name) == ("recovery", "recovery-p95")
    assert medians.outcomes["syncline"].values == [pytest.approx(30.05), 0.1]
    assert p95.outcomes["syncline"].values == [pytest.approx(0.1 + 0.95 * 59.9), 0.1]
    assert medians.outcomes["torchrun, DDP"].values == p95.outcomes["torchrun, DDP"].values == [0.1, 0.1]
    assert [seed for _, seed in torchrun.asked] == ["0 0 0", "0 1 0", "0 2 0"], "nothing is run again for the second"
    assert said[-2:] == [
        "torchrun, DDP: p50 100 ms, p95 100 ms, longest 100 ms (4 times) from a kill to the next step; "
        "never recovered: 0; steps done again: 0.",
        "syncline: p50 100 ms, p95 51 s, longest 1 min 00 s (4 times) from a kill to the next step; "
        "never recovered: 1 (counted as 60 s); steps done again: 0.",
    ]
    assert list(made) == []


def test_a_quick_look_has_one_kill_in_a_session_and_neither_warm_up_nor_percentiles(monkeypatch):
    torchrun, syncline = Scripted(), Scripted()
    monkeypatch.setattr(recovery, "calibrate", lambda target_ms: 2)
    monkeypatch.setattr(recovery, "under_torchrun", torchrun)
    monkeypatch.setattr(recovery, "under_syncline", syncline)
    names = []
    for suite in recovery.suites(Settings(quick=True)):
        names.append(suite.name)
        measure(suite, 2)
    assert names == ["recovery"]
    assert torchrun.asked == syncline.asked == [(1, "0 1 0"), (1, "0 2 0")]


def test_the_line_adds_up_what_was_done_again():
    told = in_words("torchrun", [settled(4.0, redone=700), settled(5.0, redone=800)], limit_s=60)
    assert told.endswith("never recovered: 0; steps done again: 1,500.")


# Killing only what is whole


def test_a_killer_of_what_is_whole_waits_for_the_replacement(tmp_path: Path, monkeypatch):
    killed: list[int] = []
    monkeypatch.setattr(kills, "zygote_of", lambda _: 1)
    monkeypatch.setattr(kills, "processes_of", lambda *_: [Process(n, 100 + n) for n in range(3)])
    monkeypatch.setattr(kills, "send", lambda pid, *_, **__: killed.append(pid) or True)
    killer = Killer(Rhythm(seconds=0.01), most=2, seed="a", only_whole=True)
    try:
        plan = {"workers": [{}] * 3, "servers": 0}
        killer.on_event(RunStarted(run_dir=str(tmp_path), plan=plan, machine={}))
        for rank in range(3):
            killer.on_event(WorkerReady(rank=rank, pid=100 + rank, parameters=1, collective="Solo"))
        killer.on_event(Progress(rank=0, epoch=0, step=1, samples=1, seconds=1.0, cursor=0))
        deadline = time.monotonic() + 10
        while not killed and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        killer._thread.join(0.2)
        assert len(killed) == 1
        killer.on_event(WorkerLost(rank=1, name="worker 1", cause="was killed", step=1, workers=2, is_replaced=True))
        killer.on_event(WentOn(view=2, members=[0, 2], step=2))
        killer._thread.join(0.2)
        assert len(killed) == 1, "one is missing"
        killer.on_event(WentOn(view=3, members=[0, 2, 1], step=9))
        killer._thread.join(10)
        assert len(killed) == 2
    finally:
        killer.close()


# For real


def test_both_contenders_train_the_same_model():
    ours, theirs = zoo.build("mlp", (784,), 10), recovery_ddp.mlp()
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]


def test_a_run_of_syncline_goes_on_after_a_kill(job: Job):
    (found,) = session(recovery.under_syncline, job, 1, "a")
    assert found.came == "recovered"
    assert list(job.folder.iterdir()) == []


def test_a_job_of_torchrun_goes_on_after_a_kill(job: Job):
    (found,) = session(recovery.under_torchrun, job, 1, "a")
    assert found.came == "recovered"
    assert 0 <= found.redone <= found.blow.step
    assert [path.name for path in job.folder.iterdir()] == ["samples.pt"]
    assert _using(job.folder) == []


def test_nothing_of_torchrun_is_left_after_ctrl_c(job: Job, monkeypatch):
    def press_ctrl_c(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery, "choose", press_ctrl_c)  # that is when all workers train
    with pytest.raises(KeyboardInterrupt):
        recovery.under_torchrun(job, 1, "a")
    assert [path.name for path in job.folder.iterdir()] == ["samples.pt"]
    assert _using(job.folder) == []


def test_a_job_of_torchrun_that_cannot_start_is_quoted(job: Job, monkeypatch):
    monkeypatch.setattr(recovery, "_SCRIPT", Path("no_such_script.py"))
    monkeypatch.setattr(recovery, "_ENDLESS", 0)
    with pytest.raises(SynclineError, match=r"(?s)nobody could be killed. Its last words:\n.*no_such_script.py"):
        recovery.under_torchrun(job, 1, "a")


def test_ctrl_c_is_not_lost_in_a_run_that_was_about_to_be_ended(job: Job, monkeypatch):
    def attack(*_: object, **__: object) -> tuple[RunScore, KeyboardInterrupt]:
        before = signal.signal(signal.SIGINT, lambda *_: None)  # as the coordinator takes it
        os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        score = RunScore(strategy="allreduce", seed=0, outcome="interrupted", seconds=1, recoveries=(settled(0.1),))
        return score, recovery._Enough()

    monkeypatch.setattr(recovery, "attack", attack)
    with pytest.raises(KeyboardInterrupt):
        recovery.under_syncline(job, 1, "a")


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
