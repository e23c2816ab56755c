"""A node agent: a process that starts, watches and ends workers on its node for a driver elsewhere.

Here: `run_node_agent`, which connects to the driver and runs until the run is over. Workers are started by a local
engine, and so die with this process. If the agent is killed, its workers are killed at once: the driver continues
without them and starts others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from syncline.comms.control import RunFiles
from syncline.comms.zmq_sockets import Dealer, Keys
from syncline.engines.local import LocalEngine
from syncline.engines.network import Host, Network
from syncline.engines.remote.files import TASK, RunFilesCopy
from syncline.engines.remote.messages import (
    BEAT,
    PROTOCOL,
    Accepted,
    AgentHeartbeat,
    AgentProblem,
    FileChunk,
    Invitation,
    KillWorkers,
    LaunchWorker,
    MissingFiles,
    Register,
    Rejected,
    Shutdown,
    ToAgent,
    WorkerExited,
    decode_to_agent,
    encode,
)
from syncline.engines.remote.node_info import node_info_here
from syncline.errors import SynclineError

_HEARTBEAT_S = 1.0
_SILENCE_S = 30.0
"""A driver without heartbeats for this long is gone, even if its connection was not closed: a network may be cut."""
_CONNECT_S = 10.0
_DRIVER_IS_GONE = "the driver is gone"
_LIVENESS_S = 0.4
"""How often a byte goes over the liveness connection: often enough for a limit of 2 s (`agent_silence.py`)."""


def run_node_agent(
    invitation: Invitation,
    *,
    slot: int | None = None,
    address: str | None = None,
    patience_s: float = 60.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Run workers for a driver until the run is over; returns why it ended. `SynclineError` if it is rejected.

    `slot`: which of the engine's slots this agent was started for, if for a certain one. `address`: where others reach
    this machine, if not at its address on the route to the driver. The driver may start `patience_s` later than this.
    """
    driver = invitation.address.rpartition(":")[0].strip("[]")
    node = node_info_here(driver, address)
    engine = LocalEngine(Network(driver, (Host(node.host, node.address),)), kills_at_once=True)
    keys = Keys.of(invitation.secret.encode())
    name = f"{node.host}-{os.getpid()}-{secrets.token_hex(4)}"
    with (
        closing(engine),
        closing(
            Dealer(
                f"tcp://{invitation.address}",
                name.encode(),
                keys.server_public,
                keys.client_public,
                keys.client_secret,
            )
        ) as channel,
    ):
        channel.send(encode(Register(PROTOCOL, name, node, slot)))
        accepted = _wait_for_answer(channel, invitation.address, patience_s, should_stop)
        with _liveness_connection(accepted) as liveness:
            why = NodeAgent(channel, liveness, engine, RunFilesCopy(engine.scratch)).run(should_stop)
            if why == _DRIVER_IS_GONE:
                channel.close(waits=False)
            return why


class NodeAgent:
    """Carries out the driver's messages with a local engine."""

    def __init__(self, channel: Dealer, liveness: socket.socket, engine: LocalEngine, copy: RunFilesCopy) -> None:
        self._channel, self._liveness, self._engine, self._copy = channel, liveness, engine, copy

    def run(self, should_stop: Callable[[], bool]) -> str:
        heard_at, heartbeat_at = time.monotonic(), 0.0
        while True:
            data = self._channel.receive(_HEARTBEAT_S / 2, self._engine.fileno(), self._liveness.fileno())
            now = time.monotonic()
            if data is not None:
                heard_at, message = now, decode_to_agent(data)
                if isinstance(message, Shutdown):
                    return "the run is over"
                self._handle(message)
            exits = self._engine.poll()
            for change in self._copy.changes():  # a worker's last files, before its exit
                self._channel.send(encode(change))
            for exit in exits:
                self._channel.send(
                    encode(WorkerExited(exit.worker_id, exit.life, exit.pid, exit.code, exit.signal, exit.reason))
                )
            for problem in self._engine.problems():
                self._channel.send(encode(AgentProblem(problem)))
            if _is_closed(self._liveness):
                return _DRIVER_IS_GONE
            if now - heard_at > _SILENCE_S:
                return f"the driver sent no heartbeat for {_SILENCE_S:g} s"
            if should_stop():
                return "it was asked to stop"
            if now >= heartbeat_at:
                heartbeat_at = now + _HEARTBEAT_S
                self._channel.send(encode(AgentHeartbeat()))

    def _handle(self, message: ToAgent) -> None:
        if isinstance(message, LaunchWorker):
            spec, log = message.spec, Path(message.log)
            if message.marker is None:
                spec = msgspec.structs.replace(spec, files=self._local_files(spec.files))
                log = self._copy.folder / "logs" / log.name
            elif not Path(message.marker).exists():
                self._channel.send(encode(MissingFiles(spec.worker_id, spec.life)))
                return
            self._engine.launch(spec, log)
        elif isinstance(message, FileChunk):
            self._copy.write(message)
        elif isinstance(message, KillWorkers):
            self._engine.kill(message.worker_id)

    def _local_files(self, remote: RunFiles | None) -> RunFiles:
        folder = self._copy.folder
        checkpoint = remote.checkpoint_path if remote is not None else None
        return RunFiles(
            task_path=str(folder / TASK),
            run_dir=str(folder),
            checkpoint_path=str(folder / "checkpoints" / Path(checkpoint).name) if checkpoint else None,
        )


def _wait_for_answer(channel: Dealer, address: str, patience_s: float, should_stop: Callable[[], bool]) -> Accepted:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not should_stop():
        data = channel.receive(0.2)
        if data is None:
            continue
        with contextlib.suppress(msgspec.DecodeError):
            message = decode_to_agent(data)
            if isinstance(message, Rejected):
                raise SynclineError(message.reason)
            if isinstance(message, Accepted):
                return message
    raise SynclineError(
        f"No run answered at {address} within {patience_s:g} s. Check that it is running, that this machine can reach "
        "that address, and that SYNCLINE_SECRET is the same on both sides.",
        code="no-driver",
        address=address,
    )


@contextlib.contextmanager
def _liveness_connection(accepted: Accepted) -> Iterator[socket.socket]:
    host, _, port = accepted.liveness.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as connection:
        connection.sendall(accepted.token)
        connection.setblocking(False)
        has_ended = threading.Event()
        thread = threading.Thread(target=_beat, args=(connection, has_ended), name="syncline-agent-beat", daemon=True)
        thread.start()
        try:
            yield connection
        finally:
            has_ended.set()
            thread.join()


def _beat(liveness: socket.socket, has_ended: threading.Event) -> None:
    """Show the driver that this process is not stopped, also while its main thread copies large files."""
    while not has_ended.wait(_LIVENESS_S):
        try:
            liveness.send(BEAT)
        except BlockingIOError:
            continue  # the driver is held up
        except OSError:
            return  # the main thread notices


def _is_closed(liveness: socket.socket) -> bool:
    try:
        return liveness.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
