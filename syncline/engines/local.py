"""Workers as processes of this machine: the default engine.

Here: `LocalEngine`, which owns a zygote (`zygote.py`) and through it the workers. The zygote starts importing torch as
soon as the engine is made, while the driver still reads its configuration. Hosts, for this engine, are network
namespaces of this machine, if there are any (`network.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.comms.control import RunFiles, Ticket
from syncline.engines.engine import Exit
from syncline.engines.network import LOOPBACK, Network
from syncline.errors import SynclineError
from syncline.plan.machine import Machine

__all__ = ["LocalEngine"]

_CLOSE_TIMEOUT_S = 20.0
_ENVIRONMENT = {
    # Workers set their number of threads themselves; a zygote with threads could not be forked from.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # A local run speaks to itself only, unless its worker is told of another address (`comms/process_group.py`).
    "GLOO_SOCKET_IFNAME": "lo",
}


class LocalEngine:
    """An `Engine` on this machine."""

    def __init__(self, network: Network = LOOPBACK, *, ends_at_once: bool = False) -> None:
        """`ends_at_once`: should this process be killed, the workers are; otherwise they save their work first."""
        if sys.platform != "linux":
            raise SynclineError(f"The local engine runs on Linux so far; this is {sys.platform}.")
        self.network = network
        self._socket, theirs = socket.socketpair()
        namespaces = [host.namespace for host in network.hosts if host.namespace is not None]
        with theirs:
            arguments = (int(ends_at_once), theirs.fileno(), *namespaces)
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "syncline.engines.zygote", *map(str, arguments)],
                pass_fds=[theirs.fileno(), *namespaces],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the terminal is for the driver alone.
                start_new_session=True,
            )
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._received = b""
        self._closed = self._has_launched = False

    def gather(self, workers: int, tell: Callable[[str], None]) -> None:
        """There is always room here."""

    @property
    def machine(self) -> Machine:
        """This one."""
        return Machine.here()

    def provide(self, files: RunFiles) -> None:
        """They are seen from everywhere on this machine."""

    def launch(self, ticket: Ticket, log: Path) -> None:
        """Fork a worker."""
        self._has_launched = True
        log.parent.mkdir(parents=True, exist_ok=True)
        host = self.network.host_of(ticket.rank)
        told = msgspec.to_builtins(msgspec.structs.replace(ticket, host=host.address))
        self._send({"do": "launch", "ticket": told, "log": str(log.resolve()), "namespace": host.namespace})

    def scratch(self) -> Path:
        """A new folder for files that go when this engine does, however it does: also if this process is killed."""
        folder = tempfile.mkdtemp(prefix="syncline-outpost-")
        self._has_launched = True  # the zygote has something to do at its end
        self._send({"do": "remove at the end", "folder": folder})
        return Path(folder)

    def poll(self) -> list[Exit]:
        """The workers that have ended."""
        while self._poll.poll(0):
            data = self._socket.recv(65536)
            if not data:
                code = self._zygote.wait(timeout=5)
                raise SynclineError(
                    f"The process that starts workers ended with exit code {code}. Its last words are above; "
                    "if there are none, it was killed, perhaps for want of memory."
                )
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [Exit(**json.loads(line)) for line in lines]

    def kill(self, rank: int | None = None) -> None:
        """End all workers now, or one."""
        self._send({"do": "kill", "rank": rank})

    def close(self) -> None:
        """End the workers and the zygote."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(SynclineError):  # it is gone
            self._send({"do": "end"})
        self._socket.close()
        if not self._has_launched:
            self._zygote.kill()  # it has nobody to see off, and may be in the middle of a long import
        try:
            self._zygote.wait(timeout=_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()  # the workers die with it
            self._zygote.wait()

    def fileno(self) -> int:
        """Readable when a worker has ended."""
        return self._socket.fileno()

    def _send(self, order: dict[str, object]) -> None:
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise SynclineError(f"The process that starts workers is gone ({error}).") from error


def _python_path() -> str:
    """The zygote must find this very package, wherever it was imported from."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
