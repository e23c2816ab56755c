"""The connection of this process to Ray: to a cluster that is there, or to one of our own on this machine.

Here: `RayConnection`, and importing Ray. Not here: what runs on it (`ray.py`, `serving/scoring/ray_scoring.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from syncline.errors import ConfigError
from syncline.planning.machine import Machine

_PROBE_S = 5.0
_LOOPBACK = "127.0.0.1"
_HTTP2_SETTINGS = b"\x04"  # the kind of the first frame, after three bytes for its length
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # about the least that Ray allows; Syncline stores nothing there
_LONGEST_FOLDER = 35  # Ray creates sockets in it, whose path may have at most 107 bytes


class RayConnection:
    """To an existing cluster, or to one of our own, which `open` starts and `leave` ends."""

    def __init__(self, ray: Any, address: str | None) -> None:
        self._ray, self._folder = ray, ""
        self._is_ours = self.is_own_cluster = False
        self._auth = os.environ.get("RAY_AUTH_MODE")
        if ray.is_initialized():
            self._check_is(address)
        elif address is not None or (address := _address_from_environment()) is not None:
            if not _answers(address):
                raise ConfigError(
                    f"No Ray cluster answers at {address}. {_JOINING}", code="no-cluster", address=address
                )
            self._join(address, address)
        elif (address := _started_here()) is not None and _answers(address):
            self._join(None, address)
        else:
            self.is_own_cluster = True
        self.host = _LOOPBACK if self.is_own_cluster else str(ray.util.get_node_ip_address())
        """The address of this machine within the cluster."""

    def open(self, *, cpus: int) -> None:
        """Start our own cluster, if there is none. Like the local engine, it takes any number of workers."""
        if not self.is_own_cluster:
            return
        self._folder = tempfile.mkdtemp(prefix="syncline-ray-", dir=_short_folder())
        with _only_loopback():
            self._init(
                address="local",
                num_cpus=max(cpus, Machine.here().cores),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address=_LOOPBACK,
                _temp_dir=self._folder,
                _system_config={"worker_niceness": 0},  # by default Ray lowers the priority of its workers
            )

    def leave(self) -> None:
        """Disconnect, if this engine connected. Our own cluster ends with that."""
        if self._is_ours:
            self._ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._auth is None:  # Ray sets it for a local cluster and does not reset it
            os.environ.pop("RAY_AUTH_MODE", None)
        self._is_ours, self._folder = False, ""

    def _join(self, address: str | None, shown: str) -> None:
        try:
            self._init(address=address)
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            self._ray.shutdown()
            raise ConfigError(
                f"Cannot join the Ray cluster at {shown}: {first_line(error)} {_JOINING}",
                code="no-cluster",
                address=shown,
            ) from error

    def _init(self, **settings: Any) -> None:
        # Ray's output stays in its logs: the terminal belongs to the run.
        settings |= {"logging_level": logging.ERROR, "log_to_driver": False}
        self._is_ours = True  # also if `init` fails half-way: then there is something to shut down
        with _same_sigterm(), _without_listener():
            self._ray.init(**settings)

    def _check_is(self, address: str | None) -> None:
        """This process is connected to Ray already: use that, unless it is another cluster."""
        ours = self._ray.get_runtime_context().gcs_address
        if address not in (None, ours):
            raise ConfigError(
                f"This process is connected to the Ray cluster at {ours}, but the engine is ray://{address}. "
                "Use engine='ray' for the connected one, or call ray.shutdown() first.",
                code="other-cluster",
                connected=ours,
                requested=address,
            )


_JOINING = (
    "Use the address of the head node that 'ray start' prints, with the port of the GCS (6379 by default; port 10001 "
    "is for Ray Client, which a driver cannot use), and start the run on a node of that cluster."
)


def import_ray() -> Any:
    # Ray sends usage statistics by default. Off, unless the user has set this variable.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.placement_group
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError("Ray is not installed: pip install 'syncline[ray]'", code="not-installed") from None
    return ray


def _address_from_environment() -> str | None:
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is an address for Ray Client. {_JOINING}", code="no-cluster", address=address
        )
    return None if address in ("auto", "local") else address


def _started_here() -> str | None:
    """The cluster that `ray start` has joined on this machine; not one that another run started for itself."""
    from ray._private import services  # Ray has no public API for this that does not start a cluster

    if os.environ.get("RAY_ADDRESS") == "local":
        return None
    found = services.find_bootstrap_address(None)
    return None if found is None else str(found)


def _answers(address: str) -> bool:
    """Whether a gRPC server answers. Ray itself would retry for minutes, and print every attempt."""
    from ray._private import services

    host, _, port = address.rpartition(":")
    try:
        # On Linux, Ray replaces a loopback address by this machine's network address.
        at = services.resolve_ip_for_localhost(host.strip("[]")), int(port)
        with socket.create_connection(at, timeout=_PROBE_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return True
            connection.sendall(_HTTP2_HELLO)
            return connection.recv(4, socket.MSG_WAITALL)[3:] == _HTTP2_SETTINGS
    except (OSError, ValueError):
        return False


def _short_folder() -> str | None:
    return None if len(tempfile.gettempdir()) <= _LONGEST_FOLDER - len("/syncline-ray-12345678") else "/tmp"


@contextlib.contextmanager
def _only_loopback() -> Iterator[None]:
    """Have Ray listen on loopback only.

    On Linux it replaces a loopback address by a network address and listens on all interfaces, unless this constant,
    meant for systems with interactive firewalls, is off.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray's `init` replaces."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _without_listener() -> Iterator[None]:
    """Keep Ray from printing the log of a dead node, which it does in spite of `log_to_driver`. The run reports it."""
    from ray._private import worker

    listen = worker.listen_error_messages
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = listen


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
