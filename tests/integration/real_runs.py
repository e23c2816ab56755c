"""Helpers for tests that run the real thing: models and data small enough for seconds, and the command as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.checkpoint import store
from syncline.strategies.presets import PRESETS

ROOT = Path(__file__).parents[2]
SHARED = [p.name for p in PRESETS.values() if p.name not in ("hogwild", "h2o", "ltfb")]
IN_TURN = ", then ".join([*(f"{name} until epoch {k}" for k, name in enumerate(SHARED[:-1], 1)), SHARED[-1]])
ACROSS_HOSTS = {"ltfb(steps=4)": 3, f"{IN_TURN}(steps=4)": len(SHARED)}
"""The presets that need nothing of one host, with as many epochs as it takes to have each of them.

One after the other in one run, which takes seconds instead of a minute, except for the models that compete. Of the
others, hogwild is refused across hosts, and h2o wants several workers on each.
"""


def samples(count: int = 103, features: int = 12, classes: int = 3, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A small classification problem whose size nothing divides."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, features, generator=generator)
    weights = torch.randn(features, classes, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs @ weights).argmax(1)


def small_net(features: int = 12, classes: int = 3, seed: int = 0) -> nn.Module:
    """A network with dropout-free layers, always the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, classes))


def driver_pid() -> int:
    """Called in a worker: worker -> zygote -> driver."""
    stat = Path("/proc", str(os.getppid()), "stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


class InterruptAt(nn.Module):
    """Sends the driver a real Ctrl-C in the middle of a step, once, on the worker that is first to get there."""

    def __init__(self, net: nn.Module, step: int, flag: Path) -> None:
        super().__init__()
        self.net, self.step, self.flag = net, step, str(flag)
        self.calls, self.is_first_run = 0, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 1:
                self.is_first_run = not os.path.exists(self.flag)
            if self.calls == self.step:
                try:
                    os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(driver_pid(), signal.SIGINT)
            if 0 < self.step <= self.calls and self.is_first_run:
                # Longer and longer, so that the run is not over before the news is out, however busy the machine is.
                threading.Event().wait(min(0.02 * 2 ** (self.calls - self.step), 1.0))
        out: torch.Tensor = self.net(x)
        return out


class Slow(nn.Module):
    """Steps that take as long as real ones, so that something can happen during a run; `until` there is this file."""

    def __init__(self, net: nn.Module, seconds: float, until: Path | None = None) -> None:
        super().__init__()
        self.net, self.seconds, self.until = net, seconds, until

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not (self.until and self.until.exists()):
            threading.Event().wait(self.seconds)
        out: torch.Tensor = self.net(x)
        return out


class FailAt(nn.Module):
    """Does something bad at a given call of forward on a given rank: the scripted fault of these tests.

    With a `flag`, only the first time: the file remembers it beyond the process.
    """

    def __init__(self, net: nn.Module, *, call: int, rank: int, fault: str, flag: Path | None = None) -> None:
        super().__init__()
        self.net, self.call, self.rank, self.fault, self.flag = net, call, rank, fault, flag
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.training:
            self.calls += 1
            if self.calls == self.call and my_rank() == self.rank and not (self.flag and self.flag.exists()):
                if self.flag:
                    self.flag.touch()
                if self.fault == "raise":
                    raise ZeroDivisionError("the user's own mistake")
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "segfault":
                    os.kill(os.getpid(), signal.SIGSEGV)
                if self.fault == "exit":
                    os._exit(3)
                if self.fault == "nan":
                    return out * float("nan")
        return out


class KillServer(nn.Module):
    """Kills the process of another rank, a parameter server's say, at a given call of forward on the first worker."""

    def __init__(self, net: nn.Module, *, call: int, rank: int) -> None:
        super().__init__()
        self.net, self.call, self.rank = net, call, rank
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls == self.call and my_rank() == 0:
                os.kill(pid_of(self.rank), signal.SIGKILL)
        out: torch.Tensor = self.net(x)
        return out


def pid_of(rank: int) -> int:
    """Called in a worker: the process of another rank of the same run, by the log it writes to."""
    log = Path(os.readlink("/proc/self/fd/1")).with_stem(f"worker-{rank}")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "1") == str(log):
                return int(process.name)
        except OSError:
            continue  # gone, or not ours
    raise LookupError(f"nobody writes to {log}")


def my_rank() -> int:
    """Called in a worker: its rank, from the log it writes to."""
    target = os.readlink("/proc/self/fd/1")
    return int(Path(target).stem.removeprefix("worker-"))


def worker_process(run_dir: Path, worker_id: int) -> int:
    """The process that writes this worker's log, and whose parent, unlike a loader process's, does not."""
    log = str((run_dir / "logs" / f"worker-{worker_id}.log").resolve())
    writers = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _written_by(pid) == log}
    (worker,) = [pid for pid in writers if parent(pid) not in writers]
    return worker


def _written_by(pid: int) -> str:
    """The file that is this process's standard output."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""  # gone, or not ours


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stop(pid: int) -> float:
    """Stop a process; when that was."""
    os.kill(pid, signal.SIGSTOP)
    return time.time()


def final_state(run_dir: Path) -> dict[str, Any]:
    """The state in a run's last checkpoint."""
    return store.newest_sound(run_dir / "checkpoints")[1]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    return max(float((a[k].double() - b[k].double()).norm() / a[k].double().norm().clamp(min=1e-12)) for k in a)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of `--json`."""
        return [json.loads(line) for line in self.out.splitlines()]


def syncline(
    *arguments: str, cwd: Path, timeout_s: float = 120, env: dict[str, str] | None = None, is_warm: bool = True
) -> Ran:
    """Run the `syncline` command.

    `is_warm`: as a fork of a process that has imported torch (`warm_process.py`); otherwise as users do, for tests
    that look for the run's processes by their command lines.
    """
    words = ["-m", "syncline.cli.main", *arguments]
    if is_warm:
        from warm_process import warm_process  # not for programs of tests that import this file elsewhere

        words = warm_process().words(*words)
    else:
        words = [sys.executable, *words]
    done = subprocess.run(
        words,
        cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment(env),
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a command under test: this checkout's package, no colors, a fixed width."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", **(extra or {})}


class SignalAt(nn.Module):
    """Sends processes of the run a signal, each (call of forward, rank) once however often it is come to.

    A worker does it to itself, when it has come to that call in its present life.
    """

    def __init__(self, net: nn.Module, at: list[tuple[int, int]], flags: Path, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.net, self.at, self.flags, self.number = net, at, str(flags), int(number)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            for call, rank in self.at:
                if call == self.calls and rank == my_rank():
                    try:
                        os.close(os.open(f"{self.flags}-{call}-{rank}", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        continue
                    os.kill(os.getpid(), self.number)
        out: torch.Tensor = self.net(x)
        return out
