"""The driver's sockets for node agents, in a thread of its own, so that agents get heartbeats while the driver is busy.

Here: `AgentServer`, which knows names, connections and heartbeats. Not here: which agents are accepted and what they
do (`agent_pool.py`), and when one is silent for too long (`agent_silence.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from syncline.comms.zmq_sockets import Keys, Router
from syncline.engines.remote.agent_silence import SilenceMonitor
from syncline.engines.remote.messages import (
    BEAT,
    Accepted,
    AgentHeartbeat,
    FromAgent,
    ToAgent,
    decode_from_agent,
    encode,
)
from syncline.errors import ConfigError

_HEARTBEAT_S = 1.0
_TOKEN_BYTES = 32
_UNNAMED_S = 10.0
"""How long a new liveness connection may take to identify itself."""
_MOST_UNNAMED = 64
_BACKLOG = 1024
"""With a full queue, an agent's connection attempt waits for a second or more before it is retried."""
_TICK_S = 0.25
_UNACKNOWLEDGED = struct.Struct("=24xI")
"""The number of segments that the other host has not acknowledged, in Linux's `struct tcp_info`."""


class AgentHandler(Protocol):
    """What an `AgentServer` calls, in its own thread."""

    def on_message(self, agent: str, message: FromAgent) -> None: ...

    def on_connected(self, agent: str) -> None:
        """An agent that was admitted has opened its liveness connection."""

    def on_disconnected(self, agent: str, silent_s: float | None) -> None:
        """Its liveness connection was closed, or no heartbeat came for `silent_s`."""

    def on_tick(self, now: float) -> None:
        """The event loop calls this every second."""


class AgentServer:
    """Listens at `host`, on a free port if `port` is None; agents authenticate with `secret`."""

    def __init__(self, host: str, port: int | None, secret: str, handler: AgentHandler) -> None:
        self._handler = handler
        try:
            self._router = Router(host, Keys.of(secret.encode()), port)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"Cannot listen for workers at {host}:{port}: {error.strerror or error}. The address must be one of "
                "this machine's, and the port must be free.",
                code="cannot-listen", host=host, port=port,
            ) from None  # fmt: skip
        self.address = self._router.address.removeprefix("tcp://")
        self._liveness = socket.create_server((host, 0), backlog=_BACKLOG)
        self._liveness.setblocking(False)  # a connection may be gone again before it is accepted
        self._silence = SilenceMonitor()
        self._tokens: dict[bytes, str] = {}
        self._connections: dict[socket.socket, str] = {}
        self._unnamed: dict[socket.socket, float] = {}  # since when, the oldest first
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="syncline-agents", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def admit(self, agent: str) -> None:
        """Let an agent open its liveness connection."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._tokens[token] = agent
        host, port = self._liveness.getsockname()[:2]
        self.send(agent, Accepted(f"{host}:{port}", token))

    def send(self, agent: str, message: ToAgent) -> None:
        """Queue a message; any thread may call this."""
        self._calls.put(lambda: self._send_now(agent, message))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        with self._selector as selector:
            selector.register(self._liveness, selectors.EVENT_READ, self._accept_connection)
            selector.register(self._wake, selectors.EVENT_READ, self._run_calls)
            selector.register(int(self._router.socket.getsockopt(zmq.FD)), selectors.EVENT_READ, lambda _: None)
            checks_at = ticks_at = 0.0
            while not self._is_closing:
                for key, _ in selector.select(_TICK_S):
                    key.data(key.fileobj)
                self._run_calls(None)
                self._receive_all()
                if (now := time.monotonic()) >= checks_at:
                    checks_at = now + _TICK_S
                    self._check_silence(now)
                if now >= ticks_at:
                    ticks_at = now + _HEARTBEAT_S
                    self._tick(now)
            self._run_calls(None)
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
        self._router.close()

    def _run_calls(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def _receive_all(self) -> None:
        # ZeroMQ's descriptor only signals that there may be messages; all of them must be received each time.
        while (received := self._router.receive()) is not None:
            identity, data = received
            # Neither an invalid message nor a full disk is a reason to stop serving the other agents.
            with contextlib.suppress(msgspec.DecodeError, RecursionError, ValueError, OSError):
                agent = identity.decode()
                self._silence.on_heard(agent, time.monotonic())
                self._handler.on_message(agent, decode_from_agent(data))

    def _accept_connection(self, _: object) -> None:
        with contextlib.suppress(OSError):
            connection, _address = self._liveness.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, self._read_connection)
            self._unnamed[connection] = time.monotonic()
            if len(self._unnamed) > _MOST_UNNAMED:
                self._hang_up(next(iter(self._unnamed)))

    def _read_connection(self, connection: socket.socket) -> None:
        """A new connection sends its token; a known one sends heartbeats until it is closed."""
        try:
            data = connection.recv(_TOKEN_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._unnamed.pop(connection, None)
        if data and connection in self._connections:
            self._silence.on_heard(self._connections[connection], time.monotonic())
            return
        agent = self._tokens.pop(data, None) if data else self._connections.pop(connection, None)
        if data and agent is not None:
            self._connections[connection] = agent
            self._silence.on_connected(agent, time.monotonic())
            self._handler.on_connected(agent)
            return
        self._hang_up(connection)
        if agent is not None:
            self._silence.on_disconnected(agent)
            self._handler.on_disconnected(agent, None)

    def _hang_up(self, connection: socket.socket) -> None:
        self._unnamed.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _check_silence(self, now: float) -> None:
        self._silence.begin_check(now)
        for connection, agent in list(self._connections.items()):
            silent_s = self._silence.silent_for(agent, now, is_reachable=_is_reachable(connection))
            if silent_s is not None:
                del self._connections[connection]
                self._hang_up(connection)
                self._silence.on_disconnected(agent)
                self._handler.on_disconnected(agent, silent_s)
            else:
                with contextlib.suppress(OSError):  # its end is noticed by reading
                    connection.send(BEAT)

    def _tick(self, now: float) -> None:
        for connection in [c for c, since in self._unnamed.items() if now - since > _UNNAMED_S]:
            self._hang_up(connection)
        for agent in self._connections.values():
            self._send_now(agent, AgentHeartbeat())
        self._handler.on_tick(now)

    def _send_now(self, agent: str, message: ToAgent) -> None:
        self._router.send(agent.encode(), encode(message))


def _is_reachable(connection: socket.socket) -> bool:
    """Whether the other host has acknowledged all that it was sent, as its kernel does even for a stopped process."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED.size)
    except OSError:
        return False
    return bool(_UNACKNOWLEDGED.unpack(info)[0] == 0)
