"""An emulated cluster on one machine: its hosts are network namespaces, with links that can be slow or cut.

Here: `ClusterServer`, the process that owns the hosts and takes commands; `send_command`, for `syncline cluster`
(`cli/cluster.py`); and the `cluster` engine, which importing this module registers. Not here: creating the network
(`namespaces.py`). The cluster ends with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncline.config.owned_files import check_directory, is_our_directory, read_owned, replace_file
from syncline.engines.choose import register_engine
from syncline.engines.engine import Engine
from syncline.engines.local import LocalEngine
from syncline.engines.network import Host, Network
from syncline.errors import ConfigError, SynclineError
from syncline.lab.faults import LINKS, short_path
from syncline.lab.namespaces import Namespaces

_REPLY_TIMEOUT_S = 10.0
_TICK_S = 0.1


class ClusterServer:
    """Owns the hosts of `namespaces` and executes commands until `close` or the command `down`."""

    def __init__(self, namespaces: Namespaces, name: str, description: dict[str, Any]) -> None:
        self._namespaces, self._folder = namespaces, _folder(name)
        self._cut: dict[int, float] = {}  # host -> when to restore it
        self._description = description
        self._is_down = False
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            _check_folder(folder)  # before anything is created in it
        if _is_running(name):
            raise ConfigError(
                f"A cluster named {name!r} is already running. Take it down first: syncline cluster down.",
                code="cluster-exists",
                cluster=name,
            )
        self._path = self._folder / "socket"
        self._path.unlink(missing_ok=True)  # left by one that was killed
        self._listener = socket.socket(socket.AF_UNIX)
        with short_path(self._path) as path:
            self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        hosts = namespaces.network.hosts
        known = {
            "pid": os.getpid(),
            "driver": namespaces.network.driver,
            "hosts": [{"name": h.name, "address": h.address, "namespace": h.namespace} for h in hosts],
        }
        replace_file(self._folder / "cluster.json", json.dumps(known).encode())

    def serve(self, should_end: Callable[[], bool]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_down and not should_end():
                if selector.select(_TICK_S):
                    self._accept()
                for host, until in list(self._cut.items()):
                    if until <= time.monotonic():
                        self._restore(host)

    def close(self) -> None:
        """Remove its socket and files."""
        self._listener.close()
        for name in ("socket", "cluster.json"):
            (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_REPLY_TIMEOUT_S)
                try:
                    reply = self._execute(json.loads(connection.recv(65536)))
                except (SynclineError, ValueError, KeyError, TypeError) as error:
                    reply = f"error: {error}"
                connection.sendall(reply.encode())

    def _execute(self, command: Any) -> str:
        if isinstance(command, list):  # from a worker's scripted fault (`lab/faults/`)
            worker_id, for_s = command
            command = {"do": "cut", "host": self._namespaces.number_of(worker_id), "for_s": for_s}
        host = command.get("host")
        if host is not None and not 0 <= host < len(self._namespaces.network.hosts):
            raise ConfigError(f"There is no host {host}: the hosts are 0 to {len(self._namespaces.network.hosts) - 1}.")
        match command["do"]:
            case "cut":
                self._namespaces.cut(host)
                for_s = command.get("for_s")
                self._cut[host] = float("inf") if for_s is None else time.monotonic() + for_s
            case "heal":
                self._restore(host)
            case "status":
                cut = sorted(self._cut)
                return json.dumps({**self._description, "cut": cut, "pid": os.getpid()})
            case "down":
                self._is_down = True
            case unknown:
                raise ConfigError(f"Unknown command {unknown!r}.")
        return "done"

    def _restore(self, host: int) -> None:
        self._cut.pop(host, None)
        self._namespaces.heal(host)


def send_command(name: str, command: dict[str, Any]) -> str:
    """The reply of the cluster of this name to a command. `SynclineError` if it does not run, or the command fails."""
    try:
        _check_folders(name)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_REPLY_TIMEOUT_S)
            with short_path(command_socket(name)) as path:
                connection.connect(path)
            connection.sendall(json.dumps(command).encode())
            reply = connection.recv(65536).decode()
    except OSError:
        raise _not_running(name) from None
    if reply.startswith("error: "):
        raise SynclineError(reply.removeprefix("error: "))
    return reply


@contextmanager
def open_network(name: str) -> Iterator[Network]:
    """The network of a running cluster, for an engine in this process."""
    folder = _folder(name)
    try:
        _check_folders(name)
        known = json.loads(read_owned(folder / "cluster.json"))
        descriptors = [
            os.open(f"/proc/{known['pid']}/fd/{host['namespace']}", os.O_RDONLY | os.O_CLOEXEC)
            for host in known["hosts"]
        ]
    except ConfigError:
        raise  # not ours
    except (OSError, ValueError, KeyError):
        raise _not_running(name) from None
    try:
        hosts = zip(known["hosts"], descriptors, strict=True)
        yield Network(known["driver"], tuple(Host(h["name"], h["address"], fd) for h, fd in hosts))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def cluster_engine(name: str) -> Engine:
    """The engine `cluster` or `cluster:NAME`: workers run on its hosts, and scripted faults can cut their links."""
    which = name.partition(":")[2] or "default"
    with open_network(which) as network:
        return LocalEngine(network, environment={LINKS: str(command_socket(which))})


def command_socket(name: str) -> Path:
    """The socket on which a cluster takes commands, including those of workers whose links are to be cut."""
    return _folder(name) / "socket"


def _folder(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        raise ConfigError(f"{name!r} is no valid cluster name: use up to 40 letters, digits, - and _.", cluster=name)
    return _home() / f"syncline-clusters-{os.getuid()}" / name


def _home() -> Path:
    """`$XDG_RUNTIME_DIR`, which belongs to this user alone, or else the temporary files.

    Under `sudo -E` the variable names a directory of another user, who could replace what is in it.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    return runtime if runtime.is_absolute() and is_our_directory(runtime) else Path(tempfile.gettempdir())


def _check_folders(name: str) -> None:
    for folder in (_folder(name).parent, _folder(name)):
        _check_folder(folder)


def _check_folder(folder: Path) -> None:
    """Raise `ConfigError` if another user made the folder: anyone can guess its name."""
    try:
        check_directory(folder)
    except ConfigError as error:
        raise ConfigError(
            f"{folder} was not made by a cluster of yours, so it is not used: another user could answer there. Set "
            "XDG_RUNTIME_DIR to a directory that is yours alone.",
            code=error.code, **error.facts,
        ) from error  # fmt: skip


def _is_running(name: str) -> bool:
    try:
        send_command(name, {"do": "status"})
    except SynclineError:
        return False
    return True


def _not_running(name: str) -> ConfigError:
    return ConfigError(
        f"No cluster named {name!r} is running on this machine. Start one: sudo syncline cluster up --hosts 4",
        code="no-cluster",
        cluster=name,
    )


register_engine("cluster", cluster_engine)
