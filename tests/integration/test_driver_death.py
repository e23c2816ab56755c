"""The driver is killed: the workers save and exit by themselves, and `resume` continues from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import environment, final_state
from real_runs import syncline as command

TASK = """
import os, pathlib, signal, threading
import torch, syncline

class KillsDriver(torch.nn.Module):
    '''Steps of a real size; the tenth step of worker 0 kills the driver, once.'''

    def __init__(self):
        super().__init__()
        self.net, self.calls = torch.nn.Linear(12, 3), 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            threading.Event().wait(0.01)
        if self.calls == 10 and os.readlink("/proc/self/fd/1").endswith("worker-0.log"):
            flag = pathlib.Path("killed")
            if not flag.exists():
                flag.touch()
                stat = pathlib.Path("/proc", str(os.getppid()), "stat").read_text()
                os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        return self.net(x)

task = syncline.Task(model=KillsDriver(), data=(torch.randn(103, 12), torch.zeros(103, dtype=torch.long)),
                     optimizer=syncline.sgd(lr=0.01))
"""
LIMIT_S = 10
"""All workers are gone this long after the driver was killed."""
SOON_S = 3
"""The same, if another worker was killed with it."""
KILLS_WORKER_1 = """
                siblings = pathlib.Path("/proc", str(os.getppid()), "task", str(os.getppid()), "children")
                for pid in map(int, siblings.read_text().split()):
                    if os.readlink(f"/proc/{pid}/fd/1").endswith("worker-1.log"):
                        os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.parametrize("strategy", ["allreduce", "ssp", "sparknet", "gossip", "hogwild"])
def test_all_workers_are_gone_after_ten_seconds_and_resuming_loses_no_sample(tmp_path, strategy):
    (tmp_path / "task.py").write_text(TASK)
    process = _started(tmp_path, "--strategy", strategy)
    assert process.wait(60) == -signal.SIGKILL
    _until_no_process_is_in(tmp_path, LIMIT_S)
    stopped_at = final_state(tmp_path / "runs" / "orphan")["position"]["step"]
    assert 9 <= stopped_at < 80, "the workers saved soon after"
    _resume_and_audit(tmp_path)


@pytest.mark.parametrize(("strategy", "least"), [("allreduce", 9), ("ssp", 5)])
def test_if_a_worker_is_killed_with_the_driver_the_others_save_what_they_can_and_are_gone_soon(
    tmp_path, strategy, least
):
    before = "                os.kill(int(stat"
    assert before in TASK
    (tmp_path / "task.py").write_text(TASK.replace(before, f"{KILLS_WORKER_1.strip(chr(10))}\n{before}"))
    process = _started(tmp_path, "--strategy", strategy, "--checkpoint-every-steps", "5")
    assert process.wait(60) == -signal.SIGKILL
    _until_no_process_is_in(tmp_path, SOON_S)
    stopped_at = final_state(tmp_path / "runs" / "orphan")["position"]["step"]
    assert least <= stopped_at <= 10, "where replicas are equal, the last step; otherwise the last checkpoint"
    assert not list(tmp_path.glob("runs/orphan/checkpoints/.*")), "nothing half-written is left"
    _resume_and_audit(tmp_path)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_if_the_driver_is_killed_while_the_zygote_is_stopped_the_workers_save_and_no_process_is_left(
    tmp_path, is_replaced
):
    (tmp_path / "task.py").write_text(TASK.replace("self.calls == 10", "False"))
    process = _started(tmp_path)
    events = tmp_path / "runs" / "orphan" / "events.jsonl"
    _until(lambda: events.exists() and '"progress"' in events.read_text())
    (zygote,) = _zygotes_of(process.pid)
    os.kill(zygote, signal.SIGSTOP)
    if is_replaced:
        _until(lambda: len(_zygotes_of(process.pid)) == 2)
    process.kill()
    process.wait()
    _until_no_process_is_in(tmp_path, LIMIT_S)
    assert final_state(tmp_path / "runs" / "orphan")["position"]["step"] > 0


def _started(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    arguments = ("train", "task.py:task", "--workers", "3", "--batch", "10", "--epochs", "30", "--name", "orphan")
    return subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", *arguments, *options],
        cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _resume_and_audit(tmp_path: Path) -> None:
    resumed = command("resume", "runs/orphan", "--epochs", "8", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    audit = command("audit", "runs/orphan", cwd=tmp_path)
    assert audit.code == 0, audit.out
    clean = [line for line in audit.out.splitlines() if line.endswith("samples committed once; 0 lost, 0 repeated")]
    assert len(clean) == 8


def _until_no_process_is_in(folder: Path, limit_s: float) -> None:
    """Wait for the end of all processes that work in `folder`: those of the run, and of no other."""
    deadline = time.monotonic() + limit_s
    while left := _processes_in(folder):
        assert time.monotonic() < deadline, f"still there after {limit_s:g} s: {left}"
        threading.Event().wait(0.05)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        threading.Event().wait(0.05)


def _zygotes_of(driver: int) -> list[int]:
    lists = [tasks.read_text() for tasks in Path("/proc", str(driver), "task").glob("*/children")]
    pids = [int(child) for text in lists for child in text.split()]
    return [p for p in pids if b"syncline.engines.zygote" in Path("/proc", str(p), "cmdline").read_bytes()]


def _processes_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(folder.resolve()):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone by now, or not ours
    return found
