"""The contract of an engine, for its tests: processes start, connect, end, and leave nothing behind.

Here: `check_engine`. It plays the coordinator, without training: a worker only has to connect.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from syncline.comms.control import ControlServer, Hello, RunFiles
from syncline.engines.engine import Engine, Exit

__all__ = ["check_engine"]

Found = TypeVar("Found")


def check_engine(engine: Engine, folder: Path, *, workers: int = 2, limit_s: float = 60.0) -> None:
    """`AssertionError` if the engine breaks its contract. Closes it at the end; `folder` is for its files."""
    try:
        engine.reserve(workers, lambda _: None)
        assert len(engine.network.hosts) >= 1, "an engine has at least one host"
        assert all(host.address for host in engine.network.hosts), "each host has an address"
        assert engine.machine.cores >= 1, "a machine has at least one core"
        server = ControlServer(engine.network.driver)
        try:
            pids = _lives(engine, server, folder, workers, limit_s)
        finally:
            server.close()
    finally:
        engine.close()
        engine.close()  # closing twice is allowed
    left = [pid for pid in pids if _is_running(pid)]
    assert not left, f"processes {left} are still running after the engine was closed"


def _lives(engine: Engine, server: ControlServer, folder: Path, workers: int, limit_s: float) -> list[int]:
    """Launch, kill one, launch its replacement, kill all. Returns the pids of all these processes."""
    task = folder / "task.bin"
    task.write_bytes(b"")
    engine.provide(RunFiles(task_path=str(task), run_dir=str(folder), checkpoint_path=None))

    def hello() -> Hello:
        return _until(lambda: message if isinstance(message := server.receive(), Hello) else None, limit_s)

    for worker_id in range(workers):
        engine.launch(server.launch_spec(worker_id), folder / "logs" / f"worker-{worker_id}.log")
    hellos = [hello() for _ in range(workers)]
    pids = {message.worker_id: message.pid for message in hellos}
    assert sorted(pids) == list(range(workers)), f"each worker connects once; these did: {sorted(pids)}"
    assert len(set(pids.values())) == workers, "each worker is a process of its own"
    assert engine.poll() == [], "no worker has ended yet"

    engine.kill(0)
    assert select.select([engine.fileno()], [], [], limit_s)[0], (
        "its descriptor becomes readable when a worker has ended"
    )
    (end,) = _exits(engine, 1, limit_s)
    assert (end.worker_id, end.life, end.signal) == (0, 0, signal.SIGKILL), (
        f"worker 0 was killed by SIGKILL, but the exit is {end}"
    )
    assert end.pid == pids[0], "the exit names the process"

    engine.launch(server.launch_spec(0, life=1), folder / "logs" / "worker-0.log")
    again = hello()
    assert again.worker_id == 0, "the replacement has the same worker_id"
    assert again.pid != pids[0], "the replacement is a new process"

    engine.kill()
    ends = _exits(engine, workers, limit_s)
    assert {(e.worker_id, e.life) for e in ends} == {(0, 1), *((worker_id, 0) for worker_id in range(1, workers))}
    return [*pids.values(), again.pid]


def _exits(engine: Engine, count: int, limit_s: float) -> list[Exit]:
    found: list[Exit] = []

    def all_of_them() -> list[Exit] | None:
        found.extend(engine.poll())
        return found if len(found) >= count else None

    return _until(all_of_them, limit_s)


def _until(what: Callable[[], Found | None], limit_s: float) -> Found:
    deadline = time.monotonic() + limit_s
    while (found := what()) is None:
        assert time.monotonic() < deadline, f"nothing within {limit_s:g} s"
        select.select([], [], [], 0.01)
    return found


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
