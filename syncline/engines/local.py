"""Workers as processes on this machine: the default engine.

Here: `LocalEngine`, which forks workers from a zygote process (`zygote.py`). The zygote starts importing torch as soon
as the engine is created, while the driver still reads its configuration. The hosts of this engine are network
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
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from syncline.comms.control import LaunchSpec, RunFiles
from syncline.config.owned_files import file_mode, make_directory
from syncline.engines.engine import Exit
from syncline.engines.network import LOOPBACK, Network
from syncline.errors import SynclineError
from syncline.planning.machine import Machine

_CLOSE_TIMEOUT_S = 20.0
_ENVIRONMENT = {
    # Workers set their number of threads themselves; a zygote with threads could not be forked.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # A local run uses loopback only, unless the worker is given another address (`comms/process_group.py`).
    "GLOO_SOCKET_IFNAME": "lo",
}


class LocalEngine:
    """An `Engine` on this machine."""

    def __init__(
        self, network: Network = LOOPBACK, *, kills_at_once: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        """`kills_at_once`: if this process is killed, so are its workers; otherwise they save their work first.

        `environment`: variables for the workers in addition to those of this process.
        """
        if sys.platform != "linux":
            raise SynclineError(
                f"Workers run on Linux only, and this is {sys.platform}. Use a Linux machine, a container or WSL 2.",
                code="unsupported-platform",
                platform=sys.platform,
            )
        self.network = network
        self._socket, theirs = socket.socketpair()
        namespaces = [host.namespace for host in network.hosts if host.namespace is not None]
        with theirs:
            arguments = (int(kills_at_once), theirs.fileno(), *namespaces)
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "syncline.engines.zygote", *map(str, arguments)],
                pass_fds=[theirs.fileno(), *namespaces],
                env={**os.environ, **_ENVIRONMENT, **(environment or {}), "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the terminal goes to the driver alone.
                start_new_session=True,
            )
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._received = b""
        self._closed = self._has_launched = False

    def reserve(self, workers: int, report: Callable[[str], None]) -> None:
        """Nothing to wait for on this machine."""

    @property
    def machine(self) -> Machine:
        return Machine.here()

    def provide(self, files: RunFiles) -> None:
        """All processes on this machine see them."""

    def launch(self, spec: LaunchSpec, log: Path) -> None:
        self._has_launched = True
        log.parent.parent.mkdir(parents=True, exist_ok=True)
        make_directory(log.parent)
        host = self.network.host_of(spec.worker_id)
        sent = msgspec.to_builtins(msgspec.structs.replace(spec, host=host.address))
        how = {"log": str(log.resolve()), "log_mode": file_mode(log.parent), "namespace": host.namespace}
        self._send({"do": "launch", "spec": sent, **how})

    def scratch(self) -> Path:
        """A new folder that is deleted when this engine ends, even if this process is killed."""
        folder = tempfile.mkdtemp(prefix="syncline-agent-")
        self._has_launched = True  # the zygote must clean up at its end
        self._send({"do": "remove-at-exit", "folder": folder})
        return Path(folder)

    def poll(self) -> list[Exit]:
        """The workers that have ended."""
        while self._poll.poll(0):
            data = self._socket.recv(65536)
            if not data:
                code = self._zygote.wait(timeout=5)
                raise SynclineError(
                    f"The process that starts workers ended with exit code {code}. Its last output is above; "
                    "if there is none, it was killed, perhaps by the out-of-memory killer.",
                    code="zygote-failed",
                    exit_code=code,
                )
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [Exit(**json.loads(line)) for line in lines]

    def kill(self, worker_id: int | None = None) -> None:
        """Kill all workers now, or one."""
        self._send({"do": "kill", "worker_id": worker_id})

    def close(self) -> None:
        """End the workers and the zygote."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(SynclineError):  # it has ended already
            self._send({"do": "end"})
        self._socket.close()
        if not self._has_launched:
            self._zygote.kill()  # it has no workers to wait for, and may be in the middle of a long import
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
            raise SynclineError(
                f"The process that starts workers has ended ({error}).", code="zygote-failed"
            ) from error


def _python_path() -> str:
    """The zygote must find this very package, wherever it was imported from."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
