"""One driver per run: a live run is not resumed, and two drivers at once never pass for one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import environment, final_state
from real_runs import syncline as command
from warm_process import WarmCommand

from syncline.telemetry.run_lock import holder_of

TASK = """
import pathlib, threading
import torch, syncline

class Steps(torch.nn.Module):
    '''Steps that take longer and longer, so that no run ends before there is a file named 'enough'.'''

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(12, 3)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        for _ in range(min(self.steps, 20)):  # at most a second
            if self.training and not pathlib.Path("enough").exists():
                threading.Event().wait(0.05)
        return self.net(x)

count = int(pathlib.Path("count").read_text()) if pathlib.Path("count").exists() else 103
data = torch.randn(count, 12, generator=torch.Generator().manual_seed(1)), torch.zeros(count, dtype=torch.long)
task = syncline.Task(model=Steps(), data=data, optimizer=syncline.sgd(lr=0.01))
"""
OPTIONS = ("task.py:task", "--workers", "2", "--batch", "52", "--checkpoint-every-steps", "2", "--quiet")


@contextlib.contextmanager
def driver(folder: Path, *arguments: str) -> Iterator[WarmCommand]:
    """A driver as a process of its own, which is ended in any case."""
    process = WarmCommand("-m", "syncline.cli.main", *arguments, cwd=folder, env=environment())
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()


@contextlib.contextmanager
def live_run(folder: Path) -> Iterator[WarmCommand]:
    """A run in progress with a checkpoint, in runs/live."""
    (folder / "task.py").write_text(TASK)
    with driver(folder, "train", *OPTIONS, "--epochs", "60", "--name", "live") as process:
        until(lambda: any((folder / "runs" / "live" / "checkpoints").glob("step-*.json")))
        yield process


def until(is_so: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"did not happen within {limit_s:g} s"
        threading.Event().wait(0.02)


def is_driven_by(run_dir: Path, process: WarmCommand) -> bool:
    holder = holder_of(run_dir)
    return holder is not None and holder.pid == process.command_pid


def test_a_live_run_is_not_resumed_and_the_error_names_its_driver_and_watch(tmp_path):
    with live_run(tmp_path) as first:
        refused = command("resume", "runs/live", cwd=tmp_path)
        assert refused.code == 1
        for fact in (str(first.command_pid), "syncline watch runs/live", "--wait"):
            assert fact in refused.err
        by_option = command("train", *OPTIONS, "--resume", "runs/live", cwd=tmp_path)
        assert by_option.code == 1
        assert str(first.command_pid) in by_option.err
        (tmp_path / "enough").touch()
        assert first.wait(60) == 0
    audit = command("audit", "runs/live", cwd=tmp_path)
    assert audit.code == 0, audit.out
    assert command("resume", "runs/live", "--epochs", "61", cwd=tmp_path).code == 0, "its lock is free again"


def test_resume_auto_leaves_a_live_run_alone(tmp_path):
    with live_run(tmp_path) as first:
        other = command("train", *OPTIONS, "--epochs", "60", "--max-steps", "5", "--resume", "auto", cwd=tmp_path)
        assert other.code == 0, other.err
        assert len(list((tmp_path / "runs").iterdir())) == 2, "a new run"
        (tmp_path / "enough").touch()
        assert first.wait(60) == 0


def test_with_wait_a_second_driver_continues_when_the_first_has_ended(tmp_path):
    with live_run(tmp_path) as first, driver(tmp_path, "resume", "runs/live", "--wait", "--json") as second:
        assert second.stdout is not None
        until(lambda: "in progress" in second.stdout.readline())
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
        (tmp_path / "enough").touch()
        assert json.loads(second.communicate(timeout=60)[0].splitlines()[-1])["epochs"] == 60
        assert second.returncode == 0
    assert command("audit", "runs/live", cwd=tmp_path).code == 0


def test_of_two_drivers_that_resume_at_once_one_is_refused_and_the_other_completes_the_run(tmp_path):
    with live_run(tmp_path) as first:
        first.send_signal(signal.SIGINT)
        first.wait(60)
    again = ("resume", "runs/live", "--epochs", "100", "--quiet")  # 40 s, unless there is enough
    with driver(tmp_path, *again) as one, driver(tmp_path, *again) as other:
        until(lambda: one.poll() is not None or other.poll() is not None)
        (tmp_path / "enough").touch()
        said = [process.communicate(timeout=60)[1] for process in (one, other)]
        ended = dict(zip((one.returncode, other.returncode), said, strict=True))
    assert sorted(ended) == [0, 1]
    assert "in progress" in ended[1]
    audit = command("audit", "runs/live", cwd=tmp_path)
    assert audit.code == 0, audit.out
    assert len([line for line in audit.out.splitlines() if line.startswith("epoch ")]) == 100


def test_if_the_lock_is_deleted_the_first_driver_stops_and_the_audit_reports_both(tmp_path):
    with live_run(tmp_path) as first:
        # Stopped, it cannot make the file again before the second one has it.
        first.send_signal(signal.SIGSTOP)
        (tmp_path / "runs" / "live" / "driver.lock").unlink()
        (tmp_path / "runs" / "live" / "workers.lock").unlink()
        with driver(tmp_path, "resume", "runs/live", "--quiet") as second:
            until(lambda: is_driven_by(tmp_path / "runs" / "live", second))
            session = holder_of(tmp_path / "runs" / "live").session
            until(lambda: session in (tmp_path / "runs" / "live" / "ledger.jsonl").read_text())
            first.send_signal(signal.SIGCONT)
            assert first.wait(30) == 1
            assert f"process {second.command_pid}" in first.communicate()[1]
            (tmp_path / "enough").touch()
            assert second.wait(60) == 0
    audit = command("audit", "runs/live", cwd=tmp_path)
    assert audit.code == 1
    assert "Two drivers" in audit.out


def test_a_deleted_lock_is_made_again(tmp_path):
    lock = tmp_path / "runs" / "live" / "driver.lock"
    with live_run(tmp_path) as first:
        lock.unlink()
        until(lambda: is_driven_by(lock.parent, first))
        assert command("resume", "runs/live", cwd=tmp_path).code == 1


@pytest.mark.parametrize("how", ["removed", "moved", "emptied"])
def test_a_run_directory_that_vanishes_is_written_again_and_can_be_audited_and_resumed(tmp_path, how):
    run_dir = tmp_path / "runs" / "live"
    with live_run(tmp_path) as first:
        if how == "moved":
            run_dir.rename(tmp_path / "elsewhere")
        else:
            _remove(run_dir, also_folder=how == "removed")
        until(lambda: (run_dir / "plan.json").exists() and (run_dir / "task.bin").exists())
        until(lambda: any((run_dir / "checkpoints").glob("step-*.json")))
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
        assert "was removed or moved" in first.communicate()[1]
    (tmp_path / "enough").touch()
    resumed = command("resume", "runs/live", "--epochs", "60", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    audit = command("audit", "runs/live", cwd=tmp_path)
    assert audit.code == 0, audit.out
    events = (run_dir / "events.jsonl").read_text().splitlines()
    assert json.loads(events[0])["event"] == "run_started", "all events are there"


def _remove(run_dir: Path, *, also_folder: bool) -> None:
    """Remove everything, although the run keeps writing meanwhile."""
    while True:
        with contextlib.suppress(OSError):
            for path in run_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if also_folder:
                run_dir.rmdir()
            return


def test_a_run_directory_that_cannot_be_written_again_ends_the_run_with_an_error(tmp_path):
    with live_run(tmp_path) as first:
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
        (tmp_path / "runs").write_text("a file where the folder was")
        assert first.wait(30) == 1
        assert "cannot be written again" in first.communicate()[1]


def test_other_data_is_refused_and_with_permission_begins_a_new_epoch(tmp_path):
    with live_run(tmp_path) as first:
        first.send_signal(signal.SIGINT)
        first.wait(60)
    run_dir = tmp_path / "runs" / "live"
    before = final_state(run_dir)["position"]
    (tmp_path / "enough").touch()
    (tmp_path / "count").write_text("77")
    again = ("train", *OPTIONS, "--resume", "runs/live", "--epochs", str(before["epoch"] + 4))
    refused = command(*again, cwd=tmp_path)
    assert refused.code == 1
    for fact in ("77 samples", "103", "--data-changed ok"):
        assert fact in refused.err
    allowed = command(*again, "--data-changed", "ok", cwd=tmp_path)
    assert allowed.code == 0, allowed.err
    audit = command("audit", "runs/live", cwd=tmp_path)
    assert audit.code == 0, audit.out
    lines = audit.out.splitlines()
    assert "77 of 77" in lines[before["epoch"] + 1]
    assert "103 of 103" in lines[0]


def test_a_checkpoint_of_another_run_is_not_resumed(tmp_path):
    for name in ("one", "other"):
        ran = command(
            "train", "linear", "--data", "digits", "--max-steps", "5", "--name", name, "--epochs", "1", cwd=tmp_path
        )
        assert ran.code == 0, ran.err
    theirs = tmp_path / "runs" / "other" / "checkpoints"
    for file in theirs.iterdir():
        shutil.copy(file, tmp_path / "runs" / "one" / "checkpoints" / file.name)
    refused = command("resume", "runs/one", "--max-steps", "10", cwd=tmp_path)
    assert refused.code == 1
    assert "was written by another run" in refused.err
    assert os.listdir(theirs)
