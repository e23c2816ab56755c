"""The local engine with a zygote or a worker that is stopped or killed at the worst moments.

The workers only have to connect.
"""

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
from syncline.errors import SynclineError

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


def test_a_worker_that_is_stopped_before_its_first_heartbeat_is_killed_within_three_seconds(tmp_path):
    with rigged(tmp_path) as rig:
        for worker_id in (0, 1):
            rig.launch(worker_id)
        stopped, other = (rig.until_hello(worker_id) for worker_id in (0, 1))
        os.kill(stopped, signal.SIGSTOP)
        rig.until(lambda: rig.exits, limit_s=3.0)
        (exit,) = rig.exits
        assert (exit.worker_id, exit.pid, "SIGSTOP" in exit.reason) == (0, stopped, True)
        assert not is_gone(other)


STOP_THE_FIRST_FORK = """
import os, signal

def stop():
    try:
        os.close(os.open(FLAG, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)

os.register_at_fork(after_in_child=stop)
"""


@pytest.mark.own_zygote
def test_a_worker_that_is_stopped_before_its_first_statement_is_killed(tmp_path, monkeypatch):
    text = STOP_THE_FIRST_FORK.replace("FLAG", repr(str(tmp_path / "stopped")))
    (tmp_path / "sitecustomize.py").write_text(text)  # imported by every Python process at its start
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with rigged(tmp_path) as rig:
        rig.launch(0)
        rig.until((tmp_path / "stopped").exists)
        rig.until(lambda: rig.exits, limit_s=3.0)
        assert [(e.worker_id, "SIGSTOP" in e.reason) for e in rig.exits] == [(0, True)]
        rig.launch(0, life=1)
        assert not is_gone(rig.until_hello(0))


def test_a_stopped_worker_of_a_stopped_zygote_is_killed_too(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        pid = rig.until_hello(0)
        for process in (rig.zygote, pid):
            os.kill(process, signal.SIGSTOP)
        rig.until(lambda: rig.exits, limit_s=3.0)
        assert [(e.pid, "SIGSTOP" in e.reason) for e in rig.exits] == [(pid, True)]


def test_a_killed_zygote_is_replaced_and_its_workers_count_as_killed_with_it(tmp_path):
    with rigged(tmp_path) as rig:
        for worker_id in (0, 1):
            rig.launch(worker_id)
        pids = {worker_id: rig.until_hello(worker_id) for worker_id in (0, 1)}
        old = rig.zygote
        os.kill(old, signal.SIGKILL)
        rig.until(lambda: len(rig.exits) == 2, limit_s=3.0)
        assert {e.worker_id: e.pid for e in rig.exits} == pids
        assert all("process that starts workers" in e.reason for e in rig.exits)
        (problem,) = rig.problems
        assert "SIGKILL" in problem
        rig.launch(0, life=1)
        rig.until(lambda: len(rig.hellos) == 3)
        assert rig.zygote != old
        assert len(rig.exits) == 2
    assert all(map(is_gone, (old, *pids.values())))


def test_a_launch_that_a_killed_zygote_has_missed_is_carried_out_by_the_next_one(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        rig.until_hello(0)
        os.kill(rig.zygote, signal.SIGSTOP)
        rig.launch(1)
        rig.launch(2)
        rig.engine.kill(2)
        os.kill(rig.zygote, signal.SIGKILL)
        rig.until_hello(1)
        assert {(e.worker_id, bool(e.reason)) for e in rig.exits} == {(0, True), (2, False)}


def test_zygotes_that_are_killed_before_they_have_started_a_worker_are_not_replaced_for_ever(tmp_path):
    with rigged(tmp_path) as rig:
        killed = set[int]()

        def kill_all_that_come() -> None:
            while len(killed) < 20:
                killed.add(rig.zygote)
                os.kill(rig.zygote, signal.SIGKILL)
                rig.until(lambda: rig.zygote not in killed)

        with pytest.raises(SynclineError) as caught:
            kill_all_that_come()
        assert (caught.value.code, caught.value.facts["exit_code"]) == ("zygote-failed", -signal.SIGKILL)
        assert 1 < len(killed) < 10
        assert len(rig.problems) == len(killed) - 1


def test_a_zygote_that_is_asked_to_end_is_not_replaced(tmp_path):
    with rigged(tmp_path) as rig:
        rig.launch(0)
        pid = rig.until_hello(0)
        os.kill(rig.zygote, signal.SIGTERM)
        with pytest.raises(SynclineError) as caught:
            rig.until(lambda: rig.problems)
        assert caught.value.facts["exit_code"] == -signal.SIGTERM
    assert is_gone(pid)


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
