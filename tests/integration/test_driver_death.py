"""The driver is killed: the workers save and exit by themselves, and `resume` continues from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
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


@pytest.mark.parametrize("strategy", ["allreduce", "ssp", "sparknet", "gossip", "hogwild"])
def test_all_workers_are_gone_after_ten_seconds_and_resuming_loses_no_sample(tmp_path, strategy):
    (tmp_path / "task.py").write_text(TASK)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "syncline.cli.main", "train", "task.py:task", "--workers", "3", "--batch", "10",
            "--epochs", "30", "--strategy", strategy, "--name", "orphan",
        ],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.wait(60) == -signal.SIGKILL
    _until_no_process_is_in(tmp_path, LIMIT_S)
    stopped_at = final_state(tmp_path / "runs" / "orphan")["position"]["step"]
    assert 9 <= stopped_at < 80, "the workers saved soon after"
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


def _processes_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(folder.resolve()):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone by now, or not ours
    return found
