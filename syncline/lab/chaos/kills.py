"""Random kills of a run's processes.

Here: `choose_victim`, a pure function, and `Killer`, a thread of the driver's process that sends SIGKILL. Not here:
faults at a given step (`lab/faults/`), how the run recovered (`score.py`).
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import ConfigError
from syncline.lab.chaos.processes import RunProcess, processes_of, send, zygote_of
from syncline.lab.faults import read_seconds
from syncline.telemetry.events import (
    Event,
    Progress,
    Recovered,
    RunEnded,
    RunStarted,
    Summary,
    WorkerFailure,
    WorkerReady,
)

_POLL_S = 0.02


@dataclass(frozen=True)
class KilledProcess:
    """A process that the killer has killed."""

    time: float
    worker_id: int
    pid: int
    step: int
    """Steps done, as far as the run had reported by then."""


@dataclass(frozen=True)
class KillInterval:
    """The average time or number of steps between kills; each wait is 0.5 to 1.5 times that."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ConfigError("A kill interval is a time or a number of steps. Give one of the two.")
        if not (self.seconds or self.steps or 0) > 0:
            raise ConfigError(f"A kill interval of {self} is not possible; it must be more than 0.")

    def draw(self, rng: random.Random) -> float:
        """The next wait, as a multiple of the average."""
        return rng.uniform(0.5, 1.5)

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.steps} steps"


def read_interval(text: str) -> KillInterval:
    """`3s`, `250ms`, `2min` or `200 steps`."""
    steps = re.fullmatch(r"(\d{1,15}) ?steps?", text.strip(), re.ASCII)
    if steps is not None:
        return KillInterval(steps=int(steps[1]))
    try:
        return KillInterval(seconds=read_seconds(text))
    except ConfigError:
        raise ConfigError(f"Cannot read --every {text!r}. Write it as 3s, 250ms, 2min or '200 steps'.") from None


def choose_victim(
    alive: Sequence[RunProcess],
    ready: Collection[int],
    *,
    servers: range,
    rng: random.Random,
    kill_last_worker: bool = False,
) -> RunProcess | None:
    """The process to kill; None if none may be killed.

    `ready` are the pids of workers that have joined and therefore hold the trained state. One of them is spared unless
    `kill_last_worker`. `servers` are the worker_ids of parameter servers, which are always replaced.
    """
    holders = {p.pid for p in alive if p.worker_id not in servers and p.pid in ready}
    allowed = [p for p in alive if p.worker_id in servers or kill_last_worker or holders - {p.pid}]
    return rng.choice(allowed) if allowed else None


class Killer:
    """Kills up to `most` processes of the run whose events it receives; the same `seed` makes the same choices.

    It starts when training starts, and ends with the run or with `close`. It calls `may_kill` before each kill. With
    `only_at_full_size`, each wait begins when as many workers train as at the start.
    """

    def __init__(
        self,
        interval: KillInterval,
        *,
        most: int,
        seed: str,
        kill_last_worker: bool = False,
        only_at_full_size: bool = False,
        may_kill: Callable[[], bool] = lambda: True,
    ) -> None:
        self.kills: list[KilledProcess] = []
        """The kills so far. Only the killer's thread appends to it."""
        self._interval, self._most, self._kill_last_worker, self._may_kill = interval, most, kill_last_worker, may_kill
        self._only_at_full_size, self._rng = only_at_full_size, random.Random(seed)
        self._run_dir: Path | None = None
        self._workers, self._servers = 0, range(0)
        self._ready: dict[int, int] = {}  # worker_id -> pid
        self._step = 0
        self._training, self._is_whole, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._is_whole.set()
        self._thread = threading.Thread(target=self._run, name="syncline-killer", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._workers = len(event.plan["workers"])
                self._servers = range(self._workers, self._workers + event.plan["servers"])
                self._run_dir = Path(event.run_dir)
            case WorkerReady():
                self._ready[event.worker_id] = event.pid
            case Progress():
                self._step = max(self._step, event.step)
                self._training.set()
            case WorkerFailure():
                self._is_whole.clear()  # not necessarily killed by this thread
            case Recovered():
                self._step = event.step  # a run that restores a checkpoint steps back
                if len(event.members) >= self._workers:
                    self._is_whole.set()
            case Summary() | RunEnded():
                self._closed.set()

    def close(self) -> None:
        self._closed.set()
        self._training.set()
        self._is_whole.set()
        self._thread.join()

    def _run(self) -> None:
        self._training.wait()
        while len(self.kills) < self._most and self._wait() and self._may_kill():
            self._kill_one()

    def _wait(self) -> bool:
        """Wait for the time of the next kill; False if there will be none."""
        if self._only_at_full_size:
            self._is_whole.wait()
        part = self._interval.draw(self._rng)
        if self._interval.seconds is not None:
            return not self._closed.wait(part * self._interval.seconds)
        steps, before = max(1, round(part * (self._interval.steps or 1))), self._step
        while abs(self._step - before) < steps:  # counts in either direction: the run may step back
            if self._closed.wait(_POLL_S):
                return False
        return not self._closed.is_set()

    def _kill_one(self) -> None:
        zygote = zygote_of(os.getpid())
        if zygote is None or self._run_dir is None:
            return
        alive = processes_of(self._run_dir, zygote)
        found = choose_victim(
            alive,
            set(self._ready.values()),
            servers=self._servers,
            rng=self._rng,
            kill_last_worker=self._kill_last_worker,
        )
        if found is None:
            return
        now, step = time.time(), self._step
        if send(found.pid, signal.SIGKILL, parent=zygote):
            self._is_whole.clear()  # a replacement cannot have joined yet
            self.kills.append(KilledProcess(now, found.worker_id, found.pid, step))
