"""The node agents of a run and the workers on them.

Here: `AgentPool`, which accepts agents, starts workers on them as `placement.py` decides, sends them files, and
collects the exits of workers. Not here: the sockets (`agent_server.py`), and how agents start (`engines/ray.py`,
`spark.py`, `attach.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec

from syncline.comms.control import LaunchSpec, RunFiles
from syncline.comms.segment import machine_here
from syncline.compute.processes import process_state
from syncline.engines.engine import Exit
from syncline.engines.network import Host, Network
from syncline.engines.remote.agent_server import AgentServer
from syncline.engines.remote.files import TASK, checkpoints_wanted, chunks_of, remove, write_chunk
from syncline.engines.remote.messages import (
    PROTOCOL,
    AgentProblem,
    FileChunk,
    FileRemoved,
    FromAgent,
    KillWorkers,
    LaunchWorker,
    MissingFiles,
    NodeInfo,
    Register,
    Rejected,
    Shutdown,
    WorkerExited,
)
from syncline.engines.remote.node_info import node_info_here, version_mismatch
from syncline.engines.remote.placement import Placement, StartOn
from syncline.planning.machine import Machine


class AgentPool:
    """Called by the engine, and as an `AgentHandler` by the thread of its server."""

    def __init__(self, host: str, port: int | None, secret: str) -> None:
        self._host = host
        self._our_versions, self._our_machine = node_info_here(host).versions, machine_here()
        self._lock = threading.RLock()
        self._placement = Placement()
        self._nodes: dict[str, NodeInfo] = {}
        self._wanted_slots: dict[str, int | None] = {}
        self._specs: dict[tuple[int, int], tuple[LaunchSpec, str]] = {}
        self._exits: deque[Exit] = deque()
        self.problems: deque[str] = deque()
        """Warnings from agents, for the user."""
        self.rejections: list[str] = []
        """Why agents were rejected."""
        self.files: RunFiles | None = None
        """The files that workers need; set before the first launch."""
        self._marker: Path | None = None
        self._without_files: dict[str, bool] = {}  # agents without our file system -> whether they have the task
        self.has_exits, self._changed = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        """`has_exits` becomes readable when a worker has ended."""
        self._server = AgentServer(host, port, secret, self)
        self.address = self._server.address
        self._server.start()

    # Called by the engine

    def __len__(self) -> int:
        """How many agents are connected."""
        with self._lock:
            return len(self._placement.machines)

    def assign_slots(self, count: int) -> Network | None:
        """The network of `count` slots, as soon as there are as many agents."""
        with self._lock:
            if len(self._placement.machines) < count:
                return None
            self._placement.fix(count)
            agents = [a for a in self._placement.slots if a is not None]
            names = _host_names({a: self._nodes[a] for a in self._placement.machines})
            return Network(self._host, tuple(Host(names[a], self._nodes[a].address) for a in agents))

    def machine(self) -> Machine:
        """What the nodes offer together, for the planner."""
        with self._lock:
            nodes = [self._nodes[a] for a in self._placement.slots if a is not None]
        machines = {n.machine: n for n in nodes}.values()
        first = nodes[0]
        reason = first.no_shared_memory_because
        if len(machines) == 1 and first.machine != self._our_machine:
            reason = "they are on another host than the driver"
        return replace(
            Machine.here(),
            host=first.host,
            cores=sum(n.cores for n in machines),
            memory_available_bytes=min(n.memory_available_bytes for n in machines),
            no_shared_memory_because=reason,
            gpus=len({(n.machine, gpu) for n in nodes for gpu in n.gpus}),
        )

    def launch(self, spec: LaunchSpec, log: Path) -> None:
        """Start a worker on its agent, as soon as that is connected."""
        log.parent.mkdir(parents=True, exist_ok=True)
        if self._marker is None:
            self._marker = log.parent.resolve() / f".shared-{secrets.token_hex(8)}"
            self._marker.touch()
        with self._lock:
            self._specs[spec.worker_id, spec.life] = spec, str(log.resolve())
            self._start(self._placement.launch(spec.worker_id, spec.life, time.monotonic()))

    def take_exits(self) -> list[Exit]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.has_exits)
        return [self._exits.popleft() for _ in range(len(self._exits))]

    def kill(self, worker_id: int | None) -> None:
        """Kill all workers, or one."""
        with self._lock:
            if worker_id is None:
                for agent in self._placement.machines:
                    self._server.send(agent, KillWorkers(None))
            elif (agent_of := self._placement.agent_of(worker_id)) is not None:
                self._server.send(agent_of, KillWorkers(worker_id))
            else:
                self._report(self._placement.cancel(worker_id))

    def fail_slot(self, slot: int, reason: str) -> None:
        """The process of this slot's agent has died; perhaps its connection is not closed yet."""
        with self._lock:
            for agent in self._placement.agents_for(slot):
                self._remove(agent, reason)

    def wait_for_change(self, limit_s: float) -> None:
        """Return when an agent has connected or left since the last call.

        Not by a Condition: Ctrl-C between its release of the lock and its wait would hide the KeyboardInterrupt behind
        an error about the lock.
        """
        select.select([self._changed], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changed)

    def close(self, limit_s: float) -> None:
        """Shut all agents down, and wait until they have left."""
        with self._lock:
            for agent in self._placement.machines:
                self._server.send(agent, Shutdown())
        deadline = time.monotonic() + limit_s
        while len(self) and (left_s := deadline - time.monotonic()) > 0:
            self.wait_for_change(left_s)
        self._server.close()
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)

    def release(self) -> None:
        """Close the descriptors, once no thread of a subclass can report an exit any more."""
        for descriptor in (self.has_exits, self._changed):
            os.close(descriptor)

    # Called by the server's thread

    def on_message(self, agent: str, message: FromAgent) -> None:
        with self._lock:
            if isinstance(message, Register):
                self._register(agent, message)
            elif isinstance(message, WorkerExited) and self._placement.on_exit(message.worker_id, message.life):
                self._specs.pop((message.worker_id, message.life), None)
                self._report(
                    [Exit(message.worker_id, message.pid, message.code, message.signal, message.life, message.reason)]
                )
            elif isinstance(message, AgentProblem) and agent in self._nodes:
                self.problems.append(f"{message.message} (On {self._nodes[agent].host}.)")
            elif isinstance(message, MissingFiles) and (message.worker_id, message.life) in self._specs:
                self._without_files.setdefault(agent, False)
                self._start([StartOn(agent, message.worker_id, message.life)])
            elif isinstance(message, FileChunk) and self.files is not None:
                write_chunk(Path(self.files.run_dir), message)
            elif isinstance(message, FileRemoved) and self.files is not None:
                remove(Path(self.files.run_dir), message.name)

    def on_connected(self, agent: str) -> None:
        with self._lock:
            machine = self._nodes[agent].machine
            self._start(self._placement.add_agent(agent, machine, self._wanted_slots.pop(agent, None)))
            os.eventfd_write(self._changed, 1)

    def on_disconnected(self, agent: str, silent_s: float | None) -> None:
        host = self._nodes[agent].host
        silence = f", which sent no heartbeat for {silent_s:.1f} s" if silent_s is not None else ""
        with self._lock:
            self._remove(agent, f"was lost with its node agent on {host}{silence}")
        if silent_s is not None and self._nodes[agent].machine == self._our_machine:
            _end_if_stopped(self._nodes[agent].pid)

    def on_tick(self, now: float) -> None:
        with self._lock:
            exits, starts = self._placement.tick(now)
            self._report(exits)
            self._start(starts)

    # Both threads, with the lock

    def _register(self, agent: str, message: Register) -> None:
        reason = version_mismatch(message.node, self._our_versions)
        if message.protocol != PROTOCOL:
            reason = f"Node {message.node.host} has another version of Syncline than the driver."
        if reason is not None:
            self.rejections.append(reason)
            self._server.send(agent, Rejected(reason))
        else:
            self._nodes[agent], self._wanted_slots[agent] = message.node, message.slot
            self._server.admit(agent)
        os.eventfd_write(self._changed, 1)

    def _remove(self, agent: str, reason: str) -> None:
        exits, starts = self._placement.remove_agent(agent, reason, time.monotonic())
        self._report(exits)
        self._start(starts)
        os.eventfd_write(self._changed, 1)

    def _start(self, starts: list[StartOn]) -> None:
        for start in starts:
            spec, log = self._specs[start.worker_id, start.life]
            node = self._nodes[start.agent]
            spec = msgspec.structs.replace(spec, host=node.address, is_remote=node.machine != self._our_machine)
            marker = None if start.agent in self._without_files else str(self._marker)
            if marker is None:
                self._send_files(start.agent)
                spec = msgspec.structs.replace(spec, files=self.files)
            self._server.send(start.agent, LaunchWorker(spec, log, marker))

    def _send_files(self, agent: str) -> None:
        """Send the task, once, and the newest checkpoint, which other workers may have written since."""
        assert self.files is not None, "`provide` comes before the first launch"
        wanted = [(file, f"checkpoints/{file.name}") for file in checkpoints_wanted(self.files)]
        if not self._without_files[agent]:
            self._without_files[agent] = True
            wanted.insert(0, (Path(self.files.task_path), TASK))
        for file, name in wanted:
            for chunk in chunks_of(file, name):
                self._server.send(agent, chunk)

    def _report(self, exits: list[Exit]) -> None:
        self._exits.extend(exits)
        if exits:
            os.eventfd_write(self.has_exits, 1)


def _end_if_stopped(pid: int) -> None:
    """Kill an agent on this machine if it is stopped: its workers die with it, and Ray or Spark start another."""
    with contextlib.suppress(OSError):  # gone, or not ours
        descriptor = os.pidfd_open(pid)
        try:
            if process_state(pid) == "T":
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _host_names(nodes: dict[str, NodeInfo]) -> dict[str, str]:
    """A name for each agent's machine: the same for the same machine, and different ones for different machines."""
    by_machine: dict[str, str] = {}
    for node in nodes.values():
        if node.machine not in by_machine:
            taken = [n for n in by_machine.values() if n == node.host or n.startswith(f"{node.host}-")]
            by_machine[node.machine] = node.host if not taken else f"{node.host}-{len(taken) + 1}"
    return {agent: by_machine[node.machine] for agent, node in nodes.items()}
