"""The local engine with a zygote that is stopped at the worst moments. The workers only have to connect."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from syncline.comms.control import ControlServer, Hello, RunFiles
from syncline.compute.processes import process_state, zombie_status
from syncline.engines.engine import Exit
from syncline.engines.local import LocalEngine

LIMIT_S = 20.0
Found = TypeVar("Found")


class Rig:
    """An engine, the coordinator's end of the control channel, and what the engine has reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine, self.server = LocalEngine(), ControlServer("127.0.0.1")
        self.exits: list[Exit] = []
        self.problems: list[str] = []
        self.hellos: list[Hello] = []
        self.engine.provide(RunFiles(task_path="", run_dir=str(folder), checkpoint_path=None))

    def launch(self, worker_id: int, life: int = 0) -> None:
        self.engine.launch(self.server.launch_spec(worker_id, life), self.folder / "logs" / f"{worker_id}.log")

    def step(self) -> None:
        """What the coordinator does all the time."""
        self.exits += self.engine.poll()
        self.problems += self.engine.problems()
        while (message := self.server.receive()) is not None:
            if isinstance(message, Hello):
                self.hellos.append(message)

    def until(self, what: Callable[[], Found], limit_s: float = LIMIT_S) -> Found:
        deadline = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"not within {limit_s:g} s"
            self.step()
            threading.Event().wait(0.02)
        return found

    def until_hello(self, worker_id: int) -> int:
        """The pid of the newest process of this worker, as soon as it has connected."""
        self.until(lambda: any(h.worker_id == worker_id for h in self.hellos))
        return next(h.pid for h in reversed(self.hellos) if h.worker_id == worker_id)

    @property
    def zygote(self) -> int:
        return self.engine._zygote.process.pid


@contextmanager
def rigged(folder: Path) -> Iterator[Rig]:
    rig = Rig(folder)
    try:
        yield rig
    finally:
        rig.engine.close()
        rig.server.close()


def is_gone(pid: int) -> bool:
    return process_state(pid) in ("", "Z", "X")


def test_a_stopped_zygote_is_replaced_within_three_seconds_and_the_launch_it_missed_is_carried_out(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        first, old = rig.until_hello(0), rig.zygote
        os.kill(old, signal.SIGSTOP)
        since = time.monotonic()
        rig.launch(1)
        rig.until(lambda: rig.problems, limit_s=3.0)
        assert "stopped" in rig.problems[0]
        assert time.monotonic() - since < 3.0
        second = rig.until_hello(1)
        assert rig.zygote != old
        assert not is_gone(first), "the workers of the stopped zygote continue"
        assert not is_gone(old), "they would die with it"
        assert (rig.exits, len(rig.problems)) == ([], 1)
    assert all(map(is_gone, (first, second, old)))


def test_a_worker_of_a_stopped_zygote_can_be_killed_and_its_end_is_known(tmp_path):
    with rigged(tmp_path) as rig:
        for worker_id in (0, 1):
            rig.launch(worker_id)
        pids = [rig.until_hello(worker_id) for worker_id in (0, 1)]
        old = rig.zygote
        os.kill(old, signal.SIGSTOP)
        rig.engine.kill(0)
        rig.until(lambda: rig.exits, limit_s=2.0)
        assert rig.exits == [Exit(0, pids[0], None, signal.SIGKILL, 0)]
        rig.until(lambda: rig.problems)
        rig.engine.kill()
        rig.until(lambda: len(rig.exits) == 2)
        rig.until(lambda: is_gone(old))  # it is not needed any more


def test_a_zygote_that_is_continued_later_neither_launches_twice_nor_ends_its_workers(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        first, old = rig.until_hello(0), rig.zygote
        os.kill(old, signal.SIGSTOP)
        rig.launch(1)
        second = rig.until_hello(1)
        os.kill(old, signal.SIGCONT)
        os.kill(first, signal.SIGKILL)
        rig.until(lambda: rig.exits)
        assert [(e.worker_id, e.signal) for e in rig.exits] == [(0, signal.SIGKILL)]
        assert [h.pid for h in rig.hellos] == [first, second]
        assert not is_gone(second)


def test_a_launch_that_is_canceled_while_the_zygote_is_stopped_counts_as_killed(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        rig.until_hello(0)
        os.kill(rig.zygote, signal.SIGSTOP)
        rig.launch(1, life=3)
        rig.engine.kill(1)
        rig.until(lambda: rig.exits)
        assert [(e.worker_id, e.life, e.signal) for e in rig.exits] == [(1, 3, signal.SIGKILL)]
        assert [h.worker_id for h in rig.hellos] == [0]


@pytest.mark.own_zygote
def test_a_zygote_that_is_stopped_during_its_import_is_replaced(tmp_path):
    with rigged(tmp_path) as rig:
        old = rig.zygote
        os.kill(old, signal.SIGSTOP)
        rig.launch(0)
        rig.until_hello(0)
        assert len(rig.problems) == 1
        assert is_gone(old)


def test_the_engine_closes_although_its_zygote_is_stopped(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        pid, old = rig.until_hello(0), rig.zygote
        os.kill(old, signal.SIGSTOP)
    assert is_gone(pid)
    assert is_gone(old)


def test_how_a_process_ended_can_be_read_before_its_parent_has_waited_for_it():
    for end, status in ((lambda: os._exit(7), 7), (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM)):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end()
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert zombie_status(pid) == status
        finally:
            os.waitpid(pid, 0)
        assert zombie_status(pid) is None
