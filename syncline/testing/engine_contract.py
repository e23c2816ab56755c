"""What every engine must do, as a check that its tests call: processes start, are heard, end, and leave nothing.

Here: `check_engine`. It plays the coordinator, but no training takes place: a worker that has said hello is enough.
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


def check_engine(engine: Engine, folder: Path, *, places: int = 2, limit_s: float = 60.0) -> None:
    """`AssertionError` if the engine does not keep the protocol. It is closed at the end; `folder` is for its files."""
    told: list[str] = []
    try:
        engine.gather(places, told.append)
        assert len(engine.network.hosts) >= 1, "there is at least one host"
        assert all(host.address for host in engine.network.hosts), "each has an address"
        assert engine.machine.cores >= 1, "and a core"
        server = ControlServer(engine.network.driver)
        try:
            pids = _lives(engine, server, folder, places, limit_s)
        finally:
            server.close()
    finally:
        engine.close()
        engine.close()  # twice does no harm
    left = [pid for pid in pids if _is_here(pid)]
    assert not left, f"processes {left} are left after the engine was closed"


def _lives(engine: Engine, server: ControlServer, folder: Path, places: int, limit_s: float) -> list[int]:
    """Launch, kill one, launch its replacement, kill all. The ids of all processes that there were."""
    payload = folder / "task.payload"
    payload.write_bytes(b"")
    engine.provide(RunFiles(payload_path=str(payload), run_dir=str(folder), checkpoint_path=None))

    def hello() -> Hello:
        return _until(lambda: message if isinstance(message := server.receive(), Hello) else None, limit_s)

    for rank in range(places):
        engine.launch(server.ticket(rank), folder / "logs" / f"worker-{rank}.log")
    heard = [hello() for _ in range(places)]
    pids = {message.rank: message.pid for message in heard}
    assert sorted(pids) == list(range(places)), f"each worker was to be heard once, and these were: {sorted(pids)}"
    assert len(set(pids.values())) == places, "each is a process of its own"
    assert engine.poll() == [], "nobody has ended yet"

    engine.kill(0)
    assert select.select([engine.fileno()], [], [], limit_s)[0], "its descriptor says that there is something to poll"
    (end,) = _exits(engine, 1, limit_s)
    assert (end.rank, end.life, end.signal) == (0, 0, signal.SIGKILL), f"the one that was killed, and how: {end}"
    assert end.pid == pids[0], "and which process that was"

    engine.launch(server.ticket(0, life=1), folder / "logs" / "worker-0.log")
    again = hello()
    assert again.rank == 0, "another takes its place"
    assert again.pid != pids[0], "in a process of its own"

    engine.kill()
    ends = _exits(engine, places, limit_s)
    assert {(e.rank, e.life) for e in ends} == {(0, 1), *((rank, 0) for rank in range(1, places))}
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


def _is_here(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
