"""Killing processes of a run at random: whom, when, and what was done.

Here: `choose`, a pure function that decides whom, and `Killer`, a thread of the driver's process that does it. Not
here: faults at a given step (`testing/faults.py`), what a run made of them (`score.py`).
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

from syncline.chaos.processes import Process, processes_of, send, zygote_of
from syncline.errors import ConfigError
from syncline.telemetry.events import Event, Progress, RunEnded, RunStarted, Summary, WentOn, WorkerLost, WorkerReady
from syncline.testing.faults import read_seconds

__all__ = ["Kill", "Killer", "Rhythm", "choose", "read_rhythm"]

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Kill:
    """One process that was killed."""

    time: float
    number: int
    pid: int
    step: int
    """How many steps were done, as far as had been told by then."""


@dataclass(frozen=True)
class Rhythm:
    """How long to wait between kills, on average; each wait is between half of it and one and a half times it."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ConfigError("Kills come every so many seconds or every so many steps. Give one of the two.")
        if not (self.seconds or self.steps or 0) > 0:
            raise ConfigError(f"Kills every {self} would never end; it must be more than 0.")

    def draw(self, chance: random.Random) -> float:
        """How long the next wait is, as a part of the average."""
        return chance.uniform(0.5, 1.5)

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.steps} steps"


def read_rhythm(text: str) -> Rhythm:
    """`3s`, `250ms`, `2min` or `200 steps`."""
    steps = re.fullmatch(r"(\d{1,15}) ?steps?", text.strip(), re.ASCII)
    if steps is not None:
        return Rhythm(steps=int(steps[1]))
    try:
        return Rhythm(seconds=read_seconds(text))
    except ConfigError:
        raise ConfigError(f"Cannot read --every {text!r}. Write it as 3s, 250ms, 2min or '200 steps'.") from None


def choose(
    alive: Sequence[Process],
    ready: Collection[int],
    *,
    servers: range,
    chance: random.Random,
    to_the_last: bool = False,
) -> Process | None:
    """Who is to be killed; None if nobody may be.

    `ready` are the pids of workers that take part, and so hold what was trained. One of them is left, unless it goes
    `to_the_last`. `servers` are the numbers of servers of parameters; these are always replaced.
    """
    holders = {p.pid for p in alive if p.number not in servers and p.pid in ready}
    allowed = [p for p in alive if p.number in servers or to_the_last or holders - {p.pid}]
    return chance.choice(allowed) if allowed else None


class Killer:
    """Kills up to `most` processes of the run whose events it is told of; the same `seed` draws the same lots.

    It begins when training does, and ends with the run or with `close`. `may_go_on` is asked before each kill. With
    `only_whole`, each wait begins when as many workers take part as at the start.
    """

    def __init__(
        self,
        rhythm: Rhythm,
        *,
        most: int,
        seed: str,
        to_the_last: bool = False,
        only_whole: bool = False,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self.kills: list[Kill] = []
        """What was done so far; appended to by the killer's thread only."""
        self._rhythm, self._most, self._to_the_last, self._may_go_on = rhythm, most, to_the_last, may_go_on
        self._only_whole, self._chance = only_whole, random.Random(seed)
        self._run_dir: Path | None = None
        self._workers, self._servers = 0, range(0)
        self._ready: dict[int, int] = {}  # the worker's number -> its pid
        self._step = 0
        self._trains, self._is_whole, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._is_whole.set()
        self._thread = threading.Thread(target=self._run, name="syncline-killer", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        """Something happened in the run."""
        match event:
            case RunStarted():
                self._workers = len(event.plan["workers"])
                self._servers = range(self._workers, self._workers + event.plan["servers"])
                self._run_dir = Path(event.run_dir)
            case WorkerReady():
                self._ready[event.rank] = event.pid
            case Progress():
                self._step = max(self._step, event.step)
                self._trains.set()
            case WorkerLost():
                self._is_whole.clear()  # perhaps not by our doing
            case WentOn():
                self._step = event.step  # it may have gone back
                if len(event.members) >= self._workers:
                    self._is_whole.set()
            case Summary() | RunEnded():
                self._closed.set()

    def close(self) -> None:
        """No more kills."""
        self._closed.set()
        self._trains.set()
        self._is_whole.set()
        self._thread.join()

    def _run(self) -> None:
        self._trains.wait()
        while len(self.kills) < self._most and self._wait() and self._may_go_on():
            self._kill_one()

    def _wait(self) -> bool:
        """Until it is time for the next kill; False if there will be none."""
        if self._only_whole:
            self._is_whole.wait()
        part = self._rhythm.draw(self._chance)
        if self._rhythm.seconds is not None:
            return not self._closed.wait(part * self._rhythm.seconds)
        steps, before = max(1, round(part * (self._rhythm.steps or 1))), self._step
        while abs(self._step - before) < steps:  # a run that goes back to its beginning has come far, too
            if self._closed.wait(_LOOK_EVERY_S):
                return False
        return not self._closed.is_set()

    def _kill_one(self) -> None:
        zygote = zygote_of(os.getpid())
        if zygote is None or self._run_dir is None:
            return
        alive = processes_of(self._run_dir, zygote)
        found = choose(
            alive, set(self._ready.values()), servers=self._servers, chance=self._chance, to_the_last=self._to_the_last
        )
        if found is None:
            return
        now, step = time.time(), self._step
        if send(found.pid, signal.SIGKILL, parent=zygote):
            self._is_whole.clear()  # long before another can have taken its place
            self.kills.append(Kill(now, found.number, found.pid, step))
