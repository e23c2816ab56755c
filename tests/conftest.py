"""What every test gets: its own temporary folder, and a check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from warm_process import warm_processes
from zygote_maker import ForkedZygote, makers

# The gate uses the same examples in every run, and does not fail because a machine is busy.
settings.register_profile("repeatable", derandomize=True, deadline=None)
# `make nightly` looks for new failures: more examples, from a random seed that it prints.
settings.register_profile("nightly", derandomize=False, deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")

# Two tests run at a time, each with its own processes: more than one thread per process would only compete.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LOOKUP = "syncline-open-url"  # a name lookup cannot be canceled; its thread is abandoned with it
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fail if tests that share a cluster would run in two processes: pytest-xdist 3.8 cannot group with pytest 9.2."""
    if getattr(config.option, "loadgroup", False):
        grouped = [item for item in items if item.get_closest_marker("xdist_group")]
        if any("@" not in item.nodeid for item in grouped):
            raise pytest.UsageError("pytest-xdist does not group tests with this pytest; install what is pinned.")


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of garbage collections: with all tests, each of them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _take_ctrl_c() -> None:
    """Shells start background jobs with SIGINT ignored, and children inherit that; these tests send SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _find_real_data() -> None:
    if SHARED_DATA.is_dir():
        os.environ.setdefault("SYNCLINE_DATA", str(SHARED_DATA))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs cache what they have tuned for later runs of this session, not for the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _forks_zygotes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the zygotes of a test's runs from a process that has imported torch."""
    if "own_zygote" not in request.keywords:
        stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedZygote})
        monkeypatch.setattr("syncline.engines.local.subprocess", stand_in)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """No process, thread, shared-memory segment or temporary file may outlive a test, even a failing one."""
    temporary = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # What a fixture of the module has started is there before the test, and may stay.
    segments, children, threads = _shared_memory(), _descendants(), set(threading.enumerate())
    yield

    def left() -> dict[str, list[str]]:
        found = {
            "processes": sorted(
                _command(p) for p in _descendants() - children - makers() - warm_processes() if _is_ours(p)
            ),
            "shared memory": sorted(_shared_memory() - segments),
            "temporary files": sorted(str(p) for p in temporary.rglob("*") if p.is_file() or p.is_socket()),
            "threads": sorted(
                t.name
                for t in set(threading.enumerate()) - threads
                if t.name.startswith("syncline-") and t.name != LOOKUP
            ),
        }
        return {kind: names for kind, names in found.items() if names}

    # Other programs' segments come and go; a leak of ours stays.
    deadline = time.monotonic() + 3.0
    while left() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not left(), f"left behind: {left()}"


def _shared_memory() -> set[str]:
    """Named segments, except semaphores of other programs and segments of concurrent tests."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.") and not _is_in_use_elsewhere(name)}


def _is_in_use_elsewhere(segment: str) -> bool:
    """Whether a process that is not our descendant created the segment; torch puts its creator's id into the name."""
    maker = re.match(r"torch_(\d+)_", segment)
    if maker is None or not Path("/proc", maker[1]).exists():
        return False
    return int(maker[1]) not in _descendants() | {os.getpid()}


def _descendants() -> set[int]:
    """All processes that this one started, directly or indirectly.

    From the kernel's lists of children: reading all of /proc takes 7 ms, and twice for each of 6,000 tests.
    """
    found, frontier = set[int](), [os.getpid()]
    while frontier:
        children = [child for pid in frontier for child in _children(pid)]
        frontier = [child for child in children if child not in found]
        found.update(frontier)
    return {pid for pid in found if not _is_zombie(pid)}


def _children(pid: int) -> list[int]:
    """A process is listed as a child of the thread that has started it."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found = list[int]()
    for thread in threads:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _command(pid: int) -> str:
    try:
        return f"{pid}: " + Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return ""


def _is_ours(pid: int) -> bool:
    command = _command(pid)
    # The helper processes of multiprocessing live as long as the test session, by design.
    return bool(command) and "resource_tracker" not in command and "forkserver" not in command
