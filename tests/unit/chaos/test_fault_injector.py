"""The injector: each fault comes about once, in a real process, and does what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from syncline.testing import faults
from syncline.testing.faults import Fault, Injector, ScriptedFault, happened_in

TAKE_STEPS = """
import sys, pathlib, time
from syncline.testing import faults
number, first, last, run_dir = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
injector = faults.scripted()
for step in range(first, last):
    injector.at_step(number, step, run_dir)
    print(step, flush=True)
"""


def process(run_dir: Path, script: str, *, number: int = 0, first: int = 0, last: int = 10) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKE_STEPS, str(number), str(first), str(last), str(run_dir)],
        env={**os.environ, faults.VARIABLE: script, "PYTHONPATH": str(Path(faults.__file__).parents[2])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def steps_of(run_dir: Path, script: str, **more: int) -> tuple[int, list[int], str]:
    """Exit code, the steps that were taken, and what was complained of."""
    worker = process(run_dir, script, **more)
    out, err = worker.communicate(timeout=60)
    return worker.returncode, [int(line) for line in out.split()], err


def test_a_worker_is_killed_when_it_begins_the_step_and_its_replacement_is_not(tmp_path):
    script = "kill worker 1 at step 4"
    assert steps_of(tmp_path, script, number=1) == (-signal.SIGKILL, [0, 1, 2, 3], "")
    assert steps_of(tmp_path, script, number=1, first=3) == (0, [3, 4, 5, 6, 7, 8, 9], "")
    assert steps_of(tmp_path, script, number=0) == (0, list(range(10)), "")
    (happened,) = happened_in(tmp_path)
    assert (happened.fault, happened.number, happened.step) == (Fault("kill", 4, 1), 1, 4)
    assert abs(happened.time - time.time()) < 60


def test_a_worker_that_was_not_there_at_the_step_is_hit_at_its_next_one(tmp_path):
    assert steps_of(tmp_path, "kill worker 1 at step 4", number=1, first=7)[:2] == (-signal.SIGKILL, [])
    assert happened_in(tmp_path)[0].step == 7


def test_an_exception_is_raised_that_is_none_of_our_own(tmp_path):
    code, taken, complaint = steps_of(tmp_path, "raise in worker 0 at step 2")
    assert (code, taken) == (1, [0, 1])
    assert "ScriptedFault: The script says: raise in worker 0 at step 2." in complaint
    assert not issubclass(ScriptedFault, faults.ConfigError.__mro__[1])


def test_a_stopped_worker_goes_on_after_the_time_and_leaves_nobody_behind(tmp_path):
    began = time.monotonic()
    assert steps_of(tmp_path, "stop worker 0 at step 2 for 0.4s")[:2] == (0, list(range(10)))
    assert time.monotonic() - began >= 0.4


def test_a_worker_that_is_stopped_for_good_stays_so(tmp_path):
    worker = process(tmp_path, "stop worker 0 at step 2")
    try:
        while _state(worker.pid) != "T":
            threading.Event().wait(0.01)
        assert happened_in(tmp_path)[0].step == 2
    finally:
        worker.kill()
        worker.communicate()


def test_a_slow_worker_takes_longer_for_its_steps_until_the_time_is_over(tmp_path):
    injector, taken = Injector([Fault("slow", 1, 0, delay_s=0.05, for_s=0.12)]), []
    for step in range(8):
        began = time.perf_counter()
        injector.at_step(0, step, tmp_path)
        taken.append(time.perf_counter() - began > 0.04)
    assert taken[:3] == [False, False, True]
    assert not taken[-1]


def test_a_factor_stretches_the_steps_as_they_are(tmp_path):
    injector = Injector([Fault("slow", 0, 0, factor=4)])
    injector.at_step(0, 0, tmp_path)
    time.sleep(0.05)
    began = time.perf_counter()
    injector.at_step(0, 1, tmp_path)
    assert 0.14 < time.perf_counter() - began < 1


def test_without_a_script_there_is_nothing_to_ask_in_a_step(monkeypatch):
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.scripted.cache_clear()
    assert faults.scripted() is None


# The network


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        mine = socket.create_connection(door.getsockname())
        theirs, _ = door.accept()
    return mine, theirs


def test_nothing_arrives_at_a_worker_that_is_cut_until_the_time_is_over(tmp_path, monkeypatch):
    mine, theirs = pair()
    with mine, theirs:
        monkeypatch.setattr(faults, "_connections", lambda: [mine])  # this process is both ends
        Injector([Fault("cut", 0, 0, for_s=0.5)]).at_step(0, 0, tmp_path)
        theirs.sendall(b"hello")
        mine.settimeout(0.3)
        with pytest.raises(TimeoutError):
            mine.recv(5)
        mine.settimeout(10)
        assert mine.recv(5) == b"hello", "the kernel sends it again, as it does when a wire is plugged in again"
        _wait_for_watchers()


def test_some_packets_are_lost_and_sent_again(tmp_path, monkeypatch):
    mine, theirs = pair()
    with mine, theirs:
        monkeypatch.setattr(faults, "_connections", lambda: [mine])
        Injector([Fault("lose", 0, 0, percent=50, for_s=1)]).at_step(0, 0, tmp_path)
        mine.settimeout(20)
        began = time.monotonic()
        for _ in range(10):
            theirs.sendall(b"x")
            assert mine.recv(1) == b"x"
        assert time.monotonic() - began > 0.1, "the kernel waits at least 0.2 s before it sends a packet again"
        _wait_for_watchers()


def test_a_worker_that_is_disconnected_has_all_its_connections_broken_off_and_can_make_new_ones(tmp_path):
    code = (
        "import pathlib, socket\n"
        "from syncline.testing.faults import Fault, Injector\n"
        "door = socket.create_server(('127.0.0.1', 0))\n"
        "a = socket.create_connection(door.getsockname()); b, _ = door.accept()\n"
        f"Injector([Fault('disconnect', 0, 0)]).at_step(0, 0, pathlib.Path({str(tmp_path)!r}))\n"
        "assert a.recv(1) == b'' and b.recv(1) == b''\n"
        "a2 = socket.create_connection(door.getsockname()); b2, _ = door.accept()\n"
        "b2.sendall(b'y'); assert a2.recv(1) == b'y'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# The disk


def test_a_full_disk_is_full_for_all_workers_and_for_those_that_come_later(tmp_path):
    code = (
        "import errno, os, pathlib, tempfile\n"
        "from syncline.testing import faults\n"
        f"run_dir = pathlib.Path({str(tmp_path)!r})\n"
        "faults.scripted().at_step(NUMBER, STEP, run_dir)\n"
        "with open(run_dir / 'file', 'wb') as file:\n"
        "    try:\n"
        "        os.fsync(file.fileno()); print('room')\n"
        "    except OSError as error:\n"
        "        print(errno.errorcode[error.errno])\n"
    )
    said = []
    for number, step in ((0, 4), (0, 5), (1, 6), (0, 7)):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("NUMBER", str(number)).replace("STEP", str(step))],
            env={**os.environ, faults.VARIABLE: "fill the disk at step 5"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    assert said == ["room", "ENOSPC", "ENOSPC", "ENOSPC"]
    assert len(happened_in(tmp_path)) == 1


def test_there_is_room_again_after_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", os.fsync)  # what the injector puts in its place goes with this test
    Injector([Fault("fill", 0, for_s=0.2)]).at_step(0, 0, tmp_path)
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError, match="No space left"):
            os.fsync(file.fileno())
        threading.Event().wait(0.25)
        os.fsync(file.fileno())


# Servers


def test_a_server_is_known_by_its_log_and_killed_by_the_worker_that_is_first_there(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"workers": [{}, {}]}))
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "worker-3.log").open("w") as log:
        server = subprocess.Popen(["sleep", "60"], stdout=log)
    assert steps_of(tmp_path, "kill server 1 at step 2", number=1)[:2] == (0, list(range(10)))
    assert server.wait(timeout=10) == -signal.SIGKILL
    (happened,) = happened_in(tmp_path)
    assert (happened.number, happened.pid, happened.step) == (3, server.pid, 2)


def test_a_server_that_is_not_there_is_waited_for(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"workers": [{}]}))
    assert steps_of(tmp_path, "kill server 0 at step 2")[0] == 0
    assert not happened_in(tmp_path)


def test_what_has_happened_can_be_read_while_it_is_being_written(tmp_path):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "000.json").write_text('{"fault": "kill wor')
    assert happened_in(tmp_path) == []
    assert happened_in(tmp_path / "nowhere") == []


def _state(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def _wait_for_watchers() -> None:
    for thread in threading.enumerate():
        if thread.name == "syncline-faults":
            thread.join(timeout=10)
