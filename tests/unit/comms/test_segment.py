"""Shared memory without a name: reserved when it is made, reachable while its maker wants, gone with its last user."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rank_processes import named_segments

from syncline.comms import segment as module
from syncline.comms.segment import ControlLayout, Segment, memory_available, why_not_supported

REPOSITORY = Path(__file__).parents[3]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def python(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment)


def test_new_memory_is_zero_and_as_large_as_asked_for():
    segment = Segment.create(100_000, "test")
    assert segment.size_bytes == len(segment.memory) == 100_000
    assert segment.memory[:] == bytes(100_000)
    segment.close_descriptor()


def test_new_memory_is_reserved_at_once():
    segment = Segment.create(1_000_000, "test")
    assert os.stat(segment.address.partition("#")[0]).st_blocks * 512 >= 1_000_000
    segment.close_descriptor()


def test_what_one_writes_the_other_reads():
    segment = Segment.create(4096, "test")
    other = Segment.attach(segment.address)
    assert other.size_bytes == 4096
    segment.memory[10:15] = b"hello"
    assert other.memory[10:15] == b"hello"
    other.memory[10:15] = b"again"
    assert segment.memory[10:15] == b"again"
    segment.close_descriptor()


def test_another_process_reaches_it_by_its_address():
    segment = Segment.create(4096, "test")
    with python(
        f"from syncline.comms.segment import Segment; Segment.attach({segment.address!r}).memory[:5] = b'hello'"
    ) as other:
        assert other.wait(30) == 0
    assert segment.memory[:5] == b"hello"
    segment.close_descriptor()


def test_after_the_descriptor_is_closed_nobody_new_can_attach_but_mappings_stay():
    segment = Segment.create(4096, "test")
    other = Segment.attach(segment.address)
    segment.close_descriptor()
    segment.close_descriptor()
    with pytest.raises(OSError):
        Segment.attach(segment.address)
    segment.memory[:2] = b"ok"
    assert other.memory[:2] == b"ok"


def test_memory_survives_the_death_of_its_maker_and_leaves_no_name():
    names = named_segments()
    code = (
        "from syncline.comms.segment import Segment; segment = Segment.create(4096, 'test');"
        "segment.memory[:5] = b'hello'; print(segment.address, flush=True); input()"
    )
    with python(code) as maker:
        assert maker.stdout is not None
        segment = Segment.attach(maker.stdout.readline().strip())
        maker.send_signal(signal.SIGKILL)
        maker.wait(30)
    assert segment.memory[:5] == b"hello"
    with pytest.raises(FileNotFoundError):
        Segment.attach(segment.address)
    assert named_segments() <= names


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_what_cannot_be_made_is_an_error_that_leaves_nothing_open(size_bytes):
    before = open_files()
    with pytest.raises(OSError):
        Segment.create(size_bytes, "test")
    assert open_files() == before


def test_too_little_room_is_an_error_here_and_not_a_crash_at_a_later_write():
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            Segment.create(2_000_000, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert open_files() == before


def test_nothing_stays_open_after_the_last_reference():
    before = open_files()
    segment = Segment.create(4096, "test")
    other = Segment.attach(segment.address)
    segment.close_descriptor()
    del segment, other
    assert open_files() == before


def test_attaching_to_what_is_not_there_leaves_nothing_open(tmp_path):
    before = open_files()
    with pytest.raises(FileNotFoundError):
        Segment.attach(f"/proc/{os.getpid()}/fd/99999")
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ValueError):
        Segment.attach(str(empty))
    assert open_files() == before


def test_memory_is_not_inherited_by_programs_that_are_started():
    segment = Segment.create(4096, "test")
    with python(
        "import os; print(*(os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd') if f > '2'"
        " and os.path.exists(f'/proc/self/fd/{f}')))"
    ) as other:
        found = other.communicate(timeout=30)[0]
    assert "memfd" not in found
    segment.close_descriptor()


def test_the_driver_can_use_it_without_torch():
    code = "import sys; from syncline.comms import barrier, segment; print('torch' in sys.modules)"
    with python(code) as other:
        assert other.communicate(timeout=30)[0] == "False\n"


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_parts_of_the_control_segment_are_aligned_and_do_not_overlap(size):
    layout = ControlLayout(size)
    parts = [(0, layout.slots)]
    parts += [(layout.slot(rank), layout.slot(rank) + 64) for rank in range(size)]
    parts += [(layout.notice, layout.stage)]
    parts += [(layout.staging(r, h), layout.staging(r, h) + 256 * 1024) for r in range(size) for h in (0, 1)]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(parts))
    assert parts[-1][1] == layout.total_bytes
    assert all(start % 64 == 0 for start, _ in parts)


def test_other_systems_are_told_why_they_cannot(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not_supported() == "shared-memory exchange needs Linux (this is darwin)"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert why_not_supported() == "shared-memory exchange needs an x86-64 processor (this is aarch64)"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert why_not_supported() is None

    def refuse(name: str) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert why_not_supported() == ("this system refuses anonymous shared memory ([Errno 1] Operation not permitted)")


def test_asking_whether_it_is_supported_leaves_nothing_open():
    before = open_files()
    why_not_supported()
    assert open_files() == before


def test_the_memory_available_is_some_of_the_machines():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_available() <= total


@pytest.mark.parametrize(
    ("limit", "used", "cache", "available"),
    [(1000, 400, 0, 600), (1000, 900, 700, 800), (1000, 1100, 0, 0), (None, 400, 0, 5000), (10**9, 400, 0, 5000)],
)
def test_the_limit_of_a_container_counts_but_not_the_files_it_has_read(monkeypatch, limit, used, cache, available):
    monkeypatch.setattr(module, "_machine_available", lambda: 5000)
    monkeypatch.setattr(module, "_cgroup_number", {"memory.max": limit, "memory.current": used}.get)
    monkeypatch.setattr(module, "_cgroup_reclaimable", lambda: cache)
    assert memory_available() == available
