"""The lock of a run directory: one driver at a time, whatever happens to the files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from syncline.errors import ConfigError
from syncline.telemetry import run_lock
from syncline.telemetry.run_lock import DriverLock, holder_of, lock_as_worker


def test_a_second_driver_is_refused_and_told_who_drives(tmp_path):
    with closing(DriverLock(tmp_path, "first")):
        assert holder_of(tmp_path).pid == os.getpid()
        with pytest.raises(ConfigError) as caught:
            DriverLock(tmp_path, "second")
        assert (caught.value.code, caught.value.facts["pid"]) == ("in-progress", os.getpid())
    assert holder_of(tmp_path) is None
    with closing(DriverLock(tmp_path, "second")):
        assert holder_of(tmp_path).session == "second"


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    code = (
        "import os, sys, pathlib; from syncline.telemetry.run_lock import DriverLock; "
        "DriverLock(pathlib.Path(sys.argv[1]), 'other'); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        assert holder_of(tmp_path).pid == other.pid
        other.kill()
        other.wait()
    assert holder_of(tmp_path) is None
    DriverLock(tmp_path, "mine").close()


def test_a_driver_that_may_wait_gets_the_lock_when_it_is_free(tmp_path):
    first, asked = DriverLock(tmp_path, "first"), threading.Event()

    def wait(holder):
        assert holder.session == "first"
        asked.set()
        return True

    def release():
        asked.wait(10)
        first.close()

    threading.Thread(target=release).start()
    with closing(DriverLock(tmp_path, "second", wait)):
        assert asked.is_set()


def test_a_deleted_lock_file_is_made_again_unless_another_driver_was_faster(tmp_path):
    with closing(DriverLock(tmp_path, "first")) as first:
        (tmp_path / "driver.lock").unlink()
        assert first.lost_to() is None
        assert holder_of(tmp_path).session == "first"
        (tmp_path / "driver.lock").unlink()
        with closing(DriverLock(tmp_path, "second")):
            assert first.lost_to().session == "second"


def test_a_new_driver_waits_for_the_workers_of_a_killed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "WORKERS_LEAVE_S", 0.3)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock_as_worker(tmp_path)
        os.write(writer, b".")
        os.close(writer)
        threading.Event().wait(30)
        os._exit(0)
    try:
        os.read(reader, 1)
        with pytest.raises(ConfigError) as caught:
            DriverLock(tmp_path, "next")
        assert caught.value.code == "workers-left"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    DriverLock(tmp_path, "next").close()


def test_a_lock_file_that_is_a_symlink_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "driver.lock").symlink_to(victim)
    with pytest.raises(ConfigError) as caught:
        DriverLock(tmp_path, "mine")
    assert caught.value.code == "cannot-lock"
    assert victim.read_text() == "precious"
