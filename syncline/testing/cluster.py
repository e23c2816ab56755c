"""A cluster on one machine, for as long as it is wanted: hosts that are network namespaces, with links that are as slow
as one likes and can be cut.

Here: `ClusterHost`, the process that has the hosts and waits for orders, and how others find it and speak to it:
`syncline cluster` (`cli/cluster.py`) and `--engine cluster` (`engines/choose.py`). Not here: making the network
(`namespaces.py`). Everything is gone with that process.
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

from syncline.engines.network import Host, Network
from syncline.errors import ConfigError, SynclineError
from syncline.testing.faults import short_path
from syncline.testing.namespaces import Namespaces

__all__ = ["ClusterHost", "ask", "link_socket", "opened"]

_ANSWER_S = 10.0
_TICK_S = 0.1


class ClusterHost:
    """Has the hosts of `namespaces`, and does what it is asked to until `close` or somebody asks it to end."""

    def __init__(self, namespaces: Namespaces, name: str, told: dict[str, Any]) -> None:
        self._namespaces, self._folder = namespaces, _folder(name)
        self._cut: dict[int, float] = {}  # a host -> until when
        self._told = told
        self._is_over = False
        if _is_up(name):
            raise ConfigError(f"There is a cluster {name!r} already. Take it down first: syncline cluster down.")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = self._folder / "socket"
        self._path.unlink(missing_ok=True)  # of one that was killed
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
        (self._folder / "cluster.json").write_text(json.dumps(known))

    def serve(self, should_end: Callable[[], bool]) -> None:
        """Until it is over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_over and not should_end():
                if selector.select(_TICK_S):
                    self._attend()
                for host, until in list(self._cut.items()):
                    if until <= time.monotonic():
                        self._heal(host)

    def close(self) -> None:
        """Nobody finds it any more."""
        self._listener.close()
        for name in ("socket", "cluster.json"):
            (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _attend(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_ANSWER_S)
                try:
                    answer = self._obey(json.loads(connection.recv(65536)))
                except (SynclineError, ValueError, KeyError, TypeError) as error:
                    answer = f"error: {error}"
                connection.sendall(answer.encode())

    def _obey(self, order: Any) -> str:
        if isinstance(order, list):  # a worker's wish, see `testing/faults.py`
            worker, for_s = order
            order = {"do": "cut", "host": self._namespaces.number_of(worker), "for_s": for_s}
        host = order.get("host")
        if host is not None and not 0 <= host < len(self._namespaces.network.hosts):
            raise ConfigError(f"There is no host {host}: they are 0 to {len(self._namespaces.network.hosts) - 1}.")
        match order["do"]:
            case "cut":
                self._namespaces.cut(host)
                for_s = order.get("for_s")
                self._cut[host] = float("inf") if for_s is None else time.monotonic() + for_s
            case "heal":
                self._heal(host)
            case "status":
                cut = sorted(self._cut)
                return json.dumps({**self._told, "cut": cut, "pid": os.getpid()})
            case "down":
                self._is_over = True
            case unknown:
                raise ConfigError(f"Nobody knows how to {unknown!r} here.")
        return "done"

    def _heal(self, host: int) -> None:
        self._cut.pop(host, None)
        self._namespaces.heal(host)


def ask(name: str, order: dict[str, Any]) -> str:
    """What the cluster of this name answers. `SynclineError` if there is none, or it cannot."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            with short_path(link_socket(name)) as path:
                connection.connect(path)
            connection.sendall(json.dumps(order).encode())
            answer = connection.recv(65536).decode()
    except OSError:
        raise ConfigError(_none(name)) from None
    if answer.startswith("error: "):
        raise SynclineError(answer.removeprefix("error: "))
    return answer


@contextmanager
def opened(name: str) -> Iterator[Network]:
    """The network of a cluster, for an engine of this process."""
    folder = _folder(name)
    try:
        known = json.loads((folder / "cluster.json").read_text())
        descriptors = [
            os.open(f"/proc/{known['pid']}/fd/{host['namespace']}", os.O_RDONLY | os.O_CLOEXEC)
            for host in known["hosts"]
        ]
    except (OSError, ValueError, KeyError):
        raise ConfigError(_none(name)) from None
    try:
        hosts = zip(known["hosts"], descriptors, strict=True)
        yield Network(known["driver"], tuple(Host(h["name"], h["address"], fd) for h, fd in hosts))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def link_socket(name: str) -> Path:
    """Where a cluster takes orders, also those of workers who want their links cut."""
    return _folder(name) / "socket"


def _folder(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        raise ConfigError(f"A cluster cannot be called {name!r}: use up to 40 letters, digits, - and _.")
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(home, f"syncline-clusters-{os.getuid()}", name)


def _is_up(name: str) -> bool:
    try:
        ask(name, {"do": "status"})
    except SynclineError:
        return False
    return True


def _none(name: str) -> str:
    return f"There is no cluster {name!r} up on this machine. Start one: sudo syncline cluster up --hosts 4"
