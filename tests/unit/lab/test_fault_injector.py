"""The injector: each fault happens once, in a real process, and does what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from syncline.errors import SynclineError, UnknownName
from syncline.lab import faults
from syncline.lab.faults import Fault, Injector, ScriptedFault, faults_injected, mechanics
from syncline.lab.faults.injector import injector_from_environment
from syncline.workers.step_hook import step_hook

TAKE_STEPS = """
import sys, pathlib, time
from syncline.lab.faults.injector import injector_from_environment
number, first, last, run_dir = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
injector = injector_from_environment()
for step in range(first, last):
    injector.at_step(number, step, run_dir)
    print(step, flush=True)
"""


def process(run_dir: Path, script: str, *, number: int = 0, first: int = 0, last: int = 10) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKE_STEPS, str(number), str(first), str(last), str(run_dir)],
        env={**os.environ, faults.VARIABLE: script, "PYTHONPATH": str(Path(faults.__file__).parents[3])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def steps_of(run_dir: Path, script: str, **more: int) -> tuple[int, list[int], str]:
    """Exit code, the steps that were taken, and stderr."""
    worker = process(run_dir, script, **more)
    out, err = worker.communicate(timeout=60)
    return worker.returncode, [int(line) for line in out.split()], err


def test_a_worker_is_killed_when_it_begins_the_step_and_its_replacement_is_not(tmp_path):
    script = "kill worker 1 at step 4"
    assert steps_of(tmp_path, script, number=1) == (-signal.SIGKILL, [0, 1, 2, 3], "")
    assert steps_of(tmp_path, script, number=1, first=3) == (0, [3, 4, 5, 6, 7, 8, 9], "")
    assert steps_of(tmp_path, script, number=0) == (0, list(range(10)), "")
    (record,) = faults_injected(tmp_path)
    assert (record.fault, record.worker_id, record.step) == (Fault("kill", 4, 1), 1, 4)
    assert abs(record.time - time.time()) < 60


def test_a_worker_that_did_not_run_at_the_step_is_hit_at_its_next_one(tmp_path):
    assert steps_of(tmp_path, "kill worker 1 at step 4", number=1, first=7)[:2] == (-signal.SIGKILL, [])
    assert faults_injected(tmp_path)[0].step == 7


def test_the_raised_exception_counts_as_the_users(tmp_path):
    code, taken, complaint = steps_of(tmp_path, "raise in worker 0 at step 2")
    assert (code, taken) == (1, [0, 1])
    assert re.search(r"ScriptedFault: .*raise in worker 0 at step 2", complaint)
    assert not issubclass(ScriptedFault, SynclineError)


def test_a_stopped_worker_continues_after_the_time(tmp_path):
    began = time.monotonic()
    assert steps_of(tmp_path, "stop worker 0 at step 2 for 0.4s")[:2] == (0, list(range(10)))
    assert time.monotonic() - began >= 0.4


def test_a_worker_stopped_without_a_time_stays_stopped(tmp_path):
    worker = process(tmp_path, "stop worker 0 at step 2")
    try:
        while _state(worker.pid) != "T":
            threading.Event().wait(0.01)
        assert faults_injected(tmp_path)[0].step == 2
    finally:
        worker.kill()
        worker.communicate()


def test_a_slow_worker_takes_longer_until_the_time_is_over(tmp_path):
    injector, taken = Injector([Fault("slow", 1, 0, delay_s=0.05, for_s=0.12)]), []
    for step in range(8):
        began = time.perf_counter()
        injector.at_step(0, step, tmp_path)
        taken.append(time.perf_counter() - began > 0.04)
    assert taken[:3] == [False, False, True]
    assert not taken[-1]


def test_a_factor_multiplies_the_time_of_each_step(tmp_path):
    injector = Injector([Fault("slow", 0, 0, factor=4)])
    injector.at_step(0, 0, tmp_path)
    time.sleep(0.05)
    began = time.perf_counter()
    injector.at_step(0, 1, tmp_path)
    assert 0.14 < time.perf_counter() - began < 1


def test_installing_a_script_from_python_reaches_the_step_hook(tmp_path, monkeypatch):
    for name, value in faults.install("raise in worker 1 at step 3").items():
        monkeypatch.setenv(name, value)
    step_hook.cache_clear()
    try:
        hook = step_hook()
        assert hook is not None
        hook.at_step(1, 2, tmp_path)
        with pytest.raises(ScriptedFault):
            hook.at_step(1, 3, tmp_path)
    finally:
        step_hook.cache_clear()


def test_a_mistake_in_a_script_is_reported_when_it_is_installed():
    with pytest.raises(UnknownName) as caught:
        faults.install("kil worker 1 at step 3")
    assert caught.value.facts["nearest"] == ["kill"]


def test_without_a_script_there_is_no_injector(monkeypatch):
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert injector_from_environment() is None


# The network


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        mine = socket.create_connection(door.getsockname())
        theirs, _ = door.accept()
    return mine, theirs


def test_packets_to_a_cut_worker_are_dropped_until_the_time_is_over(tmp_path, monkeypatch):
    mine, theirs = pair()
    with mine, theirs:
        monkeypatch.setattr(mechanics, "_connections", lambda: [mine])  # this process is both ends
        Injector([Fault("cut", 0, 0, for_s=0.5)]).at_step(0, 0, tmp_path)
        theirs.sendall(b"hello")
        mine.settimeout(0.3)
        with pytest.raises(TimeoutError):
            mine.recv(5)
        mine.settimeout(10)
        assert mine.recv(5) == b"hello", "the kernel retransmits it, as after a cable is plugged back in"
        _wait_for_filters()


def test_dropped_packets_are_retransmitted(tmp_path, monkeypatch):
    mine, theirs = pair()
    with mine, theirs:
        monkeypatch.setattr(mechanics, "_connections", lambda: [mine])
        Injector([Fault("lose", 0, 0, percent=50, for_s=1)]).at_step(0, 0, tmp_path)
        mine.settimeout(20)
        began = time.monotonic()
        for _ in range(10):
            theirs.sendall(b"x")
            assert mine.recv(1) == b"x"
        assert time.monotonic() - began > 0.1, "the kernel waits at least 0.2 s before it retransmits"
        _wait_for_filters()


def test_a_disconnected_worker_loses_its_connections_and_can_open_new_ones(tmp_path):
    code = (
        "import pathlib, socket\n"
        "from syncline.lab.faults import Fault, Injector\n"
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


def test_a_full_disk_is_full_for_all_workers_and_their_replacements(tmp_path):
    code = (
        "import errno, os, pathlib, tempfile\n"
        "from syncline.lab.faults.injector import injector_from_environment\n"
        f"run_dir = pathlib.Path({str(tmp_path)!r})\n"
        "injector_from_environment().at_step(NUMBER, STEP, run_dir)\n"
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
    assert len(faults_injected(tmp_path)) == 1


def test_the_disk_has_room_again_after_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", os.fsync)  # undoes the injector's replacement
    Injector([Fault("fill", 0, for_s=0.2)]).at_step(0, 0, tmp_path)
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError, match="No space left"):
            os.fsync(file.fileno())
        threading.Event().wait(0.25)
        os.fsync(file.fileno())


# Servers


def test_a_server_is_found_by_its_log_and_killed_by_the_first_worker_at_the_step(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"workers": [{}, {}]}))
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "worker-3.log").open("w") as log:
        server = subprocess.Popen(["sleep", "60"], stdout=log)
    assert steps_of(tmp_path, "kill server 1 at step 2", number=1)[:2] == (0, list(range(10)))
    assert server.wait(timeout=10) == -signal.SIGKILL
    (record,) = faults_injected(tmp_path)
    assert (record.worker_id, record.pid, record.step) == (3, server.pid, 2)


def test_a_missing_server_is_retried_at_the_next_step(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"workers": [{}]}))
    assert steps_of(tmp_path, "kill server 0 at step 2")[0] == 0
    assert not faults_injected(tmp_path)


def test_records_can_be_read_while_they_are_written(tmp_path):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "000.json").write_text('{"fault": "kill wor')
    assert faults_injected(tmp_path) == []
    assert faults_injected(tmp_path / "nowhere") == []


def _state(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def _wait_for_filters() -> None:
    for thread in threading.enumerate():
        if thread.name == "syncline-faults":
            thread.join(timeout=10)
