"""Workers on a Ray cluster: each slot is an actor that runs a node agent.

Here: `RayEngine`, which starts actors and replaces those that die; `read_name`, the syntax of --engine ray...; and the
connection of this process to Ray. Not here: what an actor does (`remote/agent.py`), and the driver's end of it
(`remote/engine.py`).

Ray provides processes on machines, and reports when one has died. Tensors do not pass through it: 100 MB through its
object store take a tenth of a second or more. Nor does Ray restart anything by itself: replacing workers is up to the
coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from syncline.engines.remote.agent import run_node_agent
from syncline.engines.remote.engine import RemoteEngine
from syncline.engines.remote.messages import Invitation
from syncline.errors import ConfigError, plural
from syncline.planning.machine import Machine

_WAIT_S = 120.0
_LOOK_EVERY_S = 0.5
_MOST_DEATHS, _WITHIN_S = 3, 60.0
"""After this many dead actors in one slot within this time, no more are started: they would die, too."""
_PROBE_S = 5.0
_LOOPBACK = "127.0.0.1"
_HTTP2_SETTINGS = b"\x04"  # the kind of the first frame, after three bytes for its length
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # about the least that Ray allows; Syncline stores nothing there
_LONGEST_FOLDER = 35  # Ray creates sockets in it, whose path may have at most 107 bytes
_SYNTAX = "ray or ray://HOST:PORT, optionally followed by ? and spread, cpus=N, gpus=N, wait=SECONDS, joined by &"


# The engine's name


@dataclass(frozen=True, kw_only=True)
class RayResources:
    """What to request from Ray."""

    address: str | None = None
    """Of the cluster's GCS; None: Ray's default cluster, or else a new one on this machine."""
    is_spread: bool = False
    """Use as many nodes as possible instead of as few."""
    cpus: float | None = None
    """Per worker; 1 by default."""
    gpus: float = 0.0
    wait_s: float = _WAIT_S
    """How long to wait for free resources."""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker, in Ray's terms."""
        return {"CPU": self.cpus or 1.0} | ({"GPU": self.gpus} if self.gpus else {})

    def lacks(self, count: int, there: dict[str, float]) -> bool:
        """Whether these resources are too few for so many workers."""
        return any(there.get(kind, 0.0) < count * each for kind, each in self.bundle.items())

    def describe(self, count: int, total: dict[str, float], free: dict[str, float]) -> str:
        """What is requested, and what the cluster has.

        >>> RayResources(cpus=2.0).describe(4, {"CPU": 6.0}, {"CPU": 5.0})
        'Requested: 4 workers with 2 CPUs each. The cluster has 6 CPUs, 5 of them free.'
        """
        each = " and ".join(plural(amount, kind) for kind, amount in self.bundle.items())
        there = " and ".join(f"{total.get(k, 0):g} {k}s, {free.get(k, 0):g} of them free" for k in self.bundle)
        return f"Requested: {count} workers with {each} each. The cluster has {there}."


def read_name(name: str) -> RayResources:
    """Parse the engine's name.

    >>> read_name("ray://10.0.0.5:6379?spread&cpus=2").address
    '10.0.0.5:6379'
    """
    place, _, options = name.partition("?")
    if place != "ray":
        host, _, port = place.removeprefix("ray://").rpartition(":")
        if not place.startswith("ray://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"The engine {name!r} is not valid. Use {_SYNTAX}. HOST:PORT is the address of the cluster's head "
                "node, such as ray://10.0.0.5:6379.",
                code="invalid-engine",
                setting="engine",
                value=name,
            )
    found: dict[str, Any] = {"address": place.removeprefix("ray").removeprefix("://") or None}
    for option in filter(None, options.split("&")):
        key, _, value = option.partition("=")
        if option == "spread":
            found["is_spread"] = True
        elif key in ("cpus", "gpus", "wait"):
            found[key if key != "wait" else "wait_s"] = _number(name, key, value, least=0.0 if key == "gpus" else None)
        else:
            raise ConfigError(
                f"The engine {name!r} has an unknown option {option!r}. Use {_SYNTAX}.",
                code="invalid-engine", setting="engine", value=name, option=option,
            )  # fmt: skip
    return RayResources(**found)


def _number(name: str, key: str, text: str, *, least: float | None) -> float:
    """A number of at least `least`, or else above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (least is None and value == 0):
        allowed = "above 0" if least is None else f"of {least:g} or more"
        raise ConfigError(
            f"{key} is {text!r} in {name!r}, but must be a number {allowed}, as in {key}=2.",
            code="invalid-engine", setting="engine", value=name, option=f"{key}={text}",
        )  # fmt: skip
    return value


# The engine


class RayEngine(RemoteEngine):
    """An `Engine` whose node agents run in Ray actors."""

    def __init__(self, name: str) -> None:
        self._request = read_name(name)
        self._ray = _import_ray()
        self._connection = _Connection(self._ray, self._request.address)
        self._group: Any = None
        self._actors: dict[Any, _AgentActor] = {}
        self._deaths: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_DEATHS))
        self._problem: str | None = None
        self._total: dict[str, float] = {}
        self._free: dict[str, float] = {}
        """What the cluster had before this request."""
        self._resources_by = math.inf
        self._is_stopping = threading.Event()
        self._watch_thread: threading.Thread | None = None
        try:
            super().__init__(self._connection.host, limit_s=self._request.wait_s)
        except BaseException:
            self._connection.leave()
            raise

    @property
    def machine(self) -> Machine:
        """What the nodes offer together: no more cores than were requested, because Ray may give the rest away."""
        machine = super().machine
        if self._connection.is_own_cluster and self._request.cpus is None:
            return machine
        reserved = math.ceil(len(self.network.hosts) * self._request.bundle["CPU"])
        return replace(machine, cores=min(machine.cores, reserved))

    def _start_agents(self, count: int) -> None:
        self._connection.open(cpus=math.ceil(count * self._request.bundle["CPU"]))
        self._total, self._free = self._ray.cluster_resources(), self._ray.available_resources()
        self._group = self._ray.util.placement_group(
            [self._request.bundle] * count, strategy="SPREAD" if self._request.is_spread else "PACK"
        )
        for slot in range(count):
            self._start_actor(slot)
        self._resources_by = time.monotonic() + self._request.wait_s
        if self._connection.is_own_cluster and self._request.lacks(count, self._total):
            self._resources_by = 0.0  # our own cluster does not grow
        self._watch_thread = threading.Thread(target=self._watch, name="syncline-ray", daemon=True)
        self._watch_thread.start()

    def _startup_problem(self) -> str | None:
        if self._problem is not None or time.monotonic() < self._resources_by:
            return self._problem
        self._resources_by = math.inf
        if self._ray.util.placement_group_table(self._group)["state"] == "CREATED":
            return None  # the resources are there; only the agents have not connected yet
        count = self._group.bundle_count
        return (
            f"This Ray cluster has no room for {count} workers. {self._describe_request(count)} Use fewer --workers, "
            "request less per worker (cpus=, gpus=), or add nodes to the cluster."
        )

    def _waiting_message(self, have: int, want: int) -> str:
        message = f"Waiting for Ray to start {want - have} of {want} workers."
        is_short = not have and self._request.lacks(want, self._free)
        return f"{message} {self._describe_request(want)}" if is_short else message

    def _stop_agents(self) -> None:
        self._is_stopping.set()
        if self._watch_thread is not None:
            self._watch_thread.join()
        with contextlib.suppress(Exception):  # Ray may be gone already
            for agent in self._actors.values():
                self._ray.kill(agent.actor, no_restart=True)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._connection.leave()

    # Actors

    def _start_actor(self, slot: int) -> None:
        """Request an actor for this slot. Ray starts it as soon as there are resources."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self._ray.remote(
            num_cpus=self._request.bundle["CPU"], num_gpus=self._request.gpus, max_restarts=0, max_task_retries=0
        )(_Actor)
        where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=slot)
        actor = remote.options(scheduling_strategy=where, name=None).remote()
        future = actor.run.remote(self.invitation.address, self.invitation.secret, slot, os.getcwd())
        self._actors[future] = _AgentActor(slot, actor)

    def _watch(self) -> None:
        try:
            while self._actors and not self._is_stopping.is_set():
                ended, _ = self._ray.wait(list(self._actors), num_returns=1, timeout=_LOOK_EVERY_S)
                for future in ended:
                    self._replace(future)
        except Exception as error:  # any of Ray's many exceptions means that it is gone
            self._problem = f"Ray cannot start more workers: {_first_line(error)}"

    def _replace(self, future: Any) -> None:
        agent = self._actors.pop(future)
        reason = self._why_ended(future)
        with contextlib.suppress(Exception):  # mostly gone already
            self._ray.kill(agent.actor, no_restart=True)  # until then, its resources are not free
        if self._is_closed:
            return
        self._pool.fail_slot(agent.slot, f"was lost with its Ray actor ({reason})")
        deaths, now = self._deaths[agent.slot], time.monotonic()
        deaths.append(now)
        if len(deaths) == _MOST_DEATHS and now - deaths[0] < _WITHIN_S:
            self._problem = f"{_MOST_DEATHS} Ray actors in a row died within {_WITHIN_S:g} s; the last one: {reason}"
        else:
            self._start_actor(agent.slot)

    def _why_ended(self, future: Any) -> str:
        try:
            return str(self._ray.get(future))
        except self._ray.exceptions.RayTaskError as error:
            return _first_line(getattr(error, "cause", None) or error)
        except self._ray.exceptions.RayError as error:
            return _first_line(error)

    def _describe_request(self, count: int) -> str:
        return self._request.describe(count, self._total, self._free)


@dataclass(frozen=True)
class _AgentActor:
    """An actor, and its slot."""

    slot: int
    actor: Any


class _Actor:
    """The Ray actor. Its process runs a node agent, and nothing else."""

    def run(self, address: str, secret: str, slot: int, folder: str) -> str:
        """Run until the run is over; returns why it ended."""
        # As if started by the driver, so that relative paths and modules beside the script are found.
        if os.path.isdir(folder):
            os.chdir(folder)
        here = str(_import_ray().util.get_node_ip_address())
        return run_node_agent(Invitation(address=address, secret=secret), slot=slot, address=here)


# The connection to Ray


class _Connection:
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
                f"Cannot join the Ray cluster at {shown}: {_first_line(error)} {_JOINING}",
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


def _import_ray() -> Any:
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


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
