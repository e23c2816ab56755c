"""Ranks that are real processes, started once and used for many collectives, for tests of transports.

A fork server that has already imported torch makes a process in milliseconds instead of seconds, and from a parent
without threads. What is to be run travels by cloudpickle; so does what comes back.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from syncline.comms.barrier import SharedBarrier
from syncline.comms.collective import Collective
from syncline.comms.segment import ControlLayout, Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.errors import PeerFailed

LIMIT_S = 60.0


class Died(Exception):
    """A rank's process ended without an answer."""


class RankProcesses:
    """`size` processes that wait for work."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(size)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank), daemon=True, name=f"rank {rank}")
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()

    def run(
        self,
        open_collective: Callable[[int], Collective],
        work: Callable[[Collective], Any],
        on_failure: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """What `work` returned on each rank, or the error of the rank that failed first and not for another's sake."""
        answers = self.answers(open_collective, work, on_failure)
        errors = [a for a in answers if isinstance(a, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, PeerFailed)):
            raise error
        return answers

    def answers(
        self,
        open_collective: Callable[[int], Collective],
        work: Callable[[Collective], Any],
        on_failure: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """What `work` returned or raised on each rank; `on_failure` is called after the first error or death."""
        job = cloudpickle.dumps((open_collective, work))
        for connection in self.connections:
            connection.send_bytes(job)
        answers: dict[int, Any] = {}
        until = time.monotonic() + LIMIT_S
        while len(answers) < len(self.connections):
            waiting = {c: r for r, c in enumerate(self.connections) if r not in answers}
            ready = multiprocessing.connection.wait(list(waiting), timeout=until - time.monotonic())
            if not ready:
                self.close(kill=True)
                raise TimeoutError(f"Ranks {sorted(waiting.values())} gave no answer within {LIMIT_S:g} s.")
            for connection in ready:
                rank = waiting[connection]
                try:
                    succeeded, value = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    succeeded, value = False, Died(f"rank {rank}")
                answers[rank] = value
                if not succeeded:
                    on_failure()
        return [answers[rank] for rank in range(len(self.connections))]

    def close(self, *, kill: bool = False) -> None:
        """End the processes, gently or not, and wait until they are gone."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            if kill:
                process.kill()
        for process in self.processes:
            process.join(LIMIT_S)
            assert process.exitcode is not None, f"{process.name} does not end"


def _serve(connection: Any, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            open_collective, work = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            collective = open_collective(rank)
            try:
                answer = (True, work(collective))
            finally:
                collective.close()
        except Exception as error:
            error.add_note(f"On rank {rank}:\n{traceback.format_exc()}")
            answer = (False, error)
        connection.send_bytes(cloudpickle.dumps(answer))


class SharedMemoryRanks:
    """A runner for collectives in shared memory: a new control segment for each run."""

    def __init__(self, processes: RankProcesses, *, limit_bytes: int | None = None) -> None:
        self.processes, self.limit_bytes = processes, limit_bytes

    def __call__(self, size: int, work: Callable[[Collective], Any], /) -> list[Any]:
        with control_segment(size) as control:
            opener = partial(_open_shared_memory, control.address, size, self.limit_bytes)
            return self.processes.run(opener, work, partial(abort, control, size))


def _open_shared_memory(address: str, size: int, limit_bytes: int | None, rank: int) -> Collective:
    return SharedMemory(Segment.attach(address), rank=rank, size=size, timeout_s=LIMIT_S, limit_bytes=limit_bytes)


@contextmanager
def control_segment(size: int) -> Iterator[Segment]:
    control = Segment.create(ControlLayout(size).total_bytes, "test")
    try:
        yield control
    finally:
        control.close_descriptor()


def abort(control: Segment, size: int) -> None:
    """What a coordinator does that is no rank itself."""
    SharedBarrier(control.memory, 0, rank=0, size=size, spin_s=0.0, timeout_s=1.0).abort()


class GlooRanks:
    """A runner for torch.distributed: a new process group through a new store for each run."""

    def __init__(self, processes: RankProcesses, *, memory_bytes: int = 0) -> None:
        self.processes, self.memory_bytes = processes, memory_bytes

    @contextmanager
    def opener(self, size: int) -> Iterator[Callable[[int], Collective]]:
        from syncline.comms.store import host_store

        secret = secrets.token_bytes(32)
        store, port = host_store("127.0.0.1", secret)
        try:
            yield partial(_open_process_group, port, secret, size, self.memory_bytes)
        finally:
            store.close()

    def __call__(self, size: int, work: Callable[[Collective], Any], /) -> list[Any]:
        with self.opener(size) as opener:
            return self.processes.run(opener, work)


def _open_process_group(port: int, secret: bytes, size: int, memory_bytes: int, rank: int) -> Collective:
    from syncline.comms.process_group import ProcessGroup
    from syncline.comms.store import connect_store

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = connect_store("127.0.0.1", port, "view-0", LIMIT_S, secret)
    group = ProcessGroup(
        store, rank=rank, size=size, device=torch.device("cpu"), timeout_s=LIMIT_S, memory_bytes=memory_bytes
    )
    group.barrier()  # a rank that leaves while another still connects makes gloo fail there
    return group


def start_fork_server(*also: str) -> None:
    """Before the first rank, and not within a test: the server's socket must not lie in a folder of one test.

    The server imports what ranks need, the modules `also` included.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "rank_processes", "syncline.comms.process_group", *also])
    forkserver.ensure_running()


def stop_fork_server() -> None:
    """End the helper processes of multiprocessing too; they start again when they are needed."""
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def children() -> set[int]:
    """The processes that this one has started and that are not gone."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def mapped_segments() -> int:
    """How many pieces of anonymous shared memory are mapped here."""
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def named_segments() -> set[str]:
    """What lies in /dev/shm and is mapped by no process: what somebody left behind."""
    # Semaphores of any program are there for an instant while they are made.
    names = {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:  # gone by now
            continue
        names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names
