"""Workers on a Ray cluster: one actor per place, and in each actor an outpost.

Here: `RayEngine`, which asks Ray for places and for others when some die; `read_name`, what may be written after
--engine; and how this process comes to be connected to Ray. Not here: what an actor does once it runs
(`outposts/outpost.py`), and the driver's end of it (`outposts/engine.py`).

Ray gives processes on machines, and says when one has died. Nothing of the training goes through it: tensors take
Syncline's own ways, because through Ray's object store 100 MB take a tenth of a second or more. Nor does Ray restart
anything by itself: who is lost and who replaces it is the coordinator's to know.
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

from syncline.engines.outposts.engine import OutpostEngine
from syncline.engines.outposts.messages import Invitation
from syncline.engines.outposts.outpost import keep_outpost
from syncline.errors import ConfigError
from syncline.plan.machine import Machine

__all__ = ["RayEngine", "Wanted", "read_name"]

_WAIT_S = 120.0
_LOOK_EVERY_S = 0.5
_MOST_DEATHS, _WITHIN_S = 3, 60.0
"""So many actors may die in one place within this time; whoever comes after them would, too."""
_PROBE_S = 5.0
_LOOPBACK = "127.0.0.1"
_HTTP2_SETTINGS = b"\x04"  # the kind of the first frame, after three bytes for its length
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # about the least that Ray allows; nothing of ours is put there
_LONGEST_FOLDER = 35  # Ray puts sockets into it, whose whole path may have 107 bytes
_FORM = "ray or ray://HOST:PORT, and after a ? any of: spread, cpus=N, gpus=N, wait=SECONDS, joined by &"


# What the user writes


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be asked of Ray."""

    address: str | None = None
    """Of the cluster's GCS; None is the one that Ray itself would take, or else a new one on this machine."""
    is_spread: bool = False
    """Over as many nodes as possible, instead of as few."""
    cpus: float | None = None
    """For each place. One, if it is not said."""
    gpus: float = 0.0
    wait_s: float = _WAIT_S
    """How long to wait for room in the cluster."""

    @property
    def bundle(self) -> dict[str, float]:
        """What one place takes, in Ray's words."""
        return {"CPU": self.cpus or 1.0} | ({"GPU": self.gpus} if self.gpus else {})

    def lacks(self, count: int, there: dict[str, float]) -> bool:
        """Whether what is there is too little for so many places."""
        return any(there.get(kind, 0.0) < count * each for kind, each in self.bundle.items())

    def in_words(self, count: int, total: dict[str, float], free: dict[str, float]) -> str:
        """What is asked for, and what there is.

        >>> Wanted(cpus=2.0).in_words(4, {"CPU": 6.0}, {"CPU": 5.0})
        'Asked for: 4 places of 2 CPUs each. The cluster has 6 CPUs, 5 of them free.'
        """
        each = " and ".join(f"{amount:g} {kind}{'s' if amount != 1 else ''}" for kind, amount in self.bundle.items())
        there = " and ".join(f"{total.get(k, 0):g} {k}s, {free.get(k, 0):g} of them free" for k in self.bundle)
        return f"Asked for: {count} places of {each} each. The cluster has {there}."


def read_name(name: str) -> Wanted:
    """What an engine's name asks for.

    >>> read_name("ray://10.0.0.5:6379?spread&cpus=2").address
    '10.0.0.5:6379'
    """
    place, _, options = name.partition("?")
    if place != "ray":
        host, _, port = place.removeprefix("ray://").rpartition(":")
        if not place.startswith("ray://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{name!r} names no Ray cluster: write {_FORM}. HOST:PORT is the address of the cluster's head, "
                "such as ray://10.0.0.5:6379."
            )
    found: dict[str, Any] = {"address": place.removeprefix("ray").removeprefix("://") or None}
    for option in filter(None, options.split("&")):
        key, _, value = option.partition("=")
        if option == "spread":
            found["is_spread"] = True
        elif key in ("cpus", "gpus", "wait"):
            found[key if key != "wait" else "wait_s"] = _number(name, key, value, least=0.0 if key == "gpus" else None)
        else:
            raise ConfigError(f"{name!r} has an option {option!r} that Ray places do not have: write {_FORM}.")
    return Wanted(**found)


def _number(name: str, key: str, text: str, *, least: float | None) -> float:
    """A number of at least `least`, or else above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (least is None and value == 0):
        allowed = "above 0" if least is None else f"of {least:g} or more"
        raise ConfigError(f"{key}={text} in {name!r} is not possible: it takes a number {allowed}, as in {key}=2.")
    return value


# The engine


class RayEngine(OutpostEngine):
    """An `Engine` whose places are actors of Ray."""

    def __init__(self, name: str) -> None:
        self._wanted = read_name(name)
        self._ray = _import_ray()
        self._connection = _Connection(self._ray, self._wanted.address)
        self._group: Any = None
        self._posts: dict[Any, _Post] = {}
        self._deaths: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_DEATHS))
        self._problem: str | None = None
        self._total: dict[str, float] = {}
        self._free: dict[str, float] = {}
        """What the cluster had before we asked."""
        self._room_by = math.inf
        self._has_left = threading.Event()
        self._watch_thread: threading.Thread | None = None
        try:
            super().__init__(self._connection.host, limit_s=self._wanted.wait_s)
        except BaseException:
            self._connection.leave()
            raise

    @property
    def machine(self) -> Machine:
        """What the places offer together: no more cores than were asked of Ray, which gives the others to others."""
        machine = super().machine
        if self._connection.is_own_cluster and self._wanted.cpus is None:
            return machine
        reserved = math.ceil(len(self._roster.seats) * self._wanted.bundle["CPU"])
        return replace(machine, cores=min(machine.cores, reserved))

    def _summon(self, count: int) -> None:
        self._connection.open(cpus=math.ceil(count * self._wanted.bundle["CPU"]))
        self._total, self._free = self._ray.cluster_resources(), self._ray.available_resources()
        self._group = self._ray.util.placement_group(
            [self._wanted.bundle] * count, strategy="SPREAD" if self._wanted.is_spread else "PACK"
        )
        for seat in range(count):
            self._post(seat)
        self._room_by = time.monotonic() + self._wanted.wait_s
        if self._connection.is_own_cluster and self._wanted.lacks(count, self._total):
            self._room_by = 0.0  # it is all there will ever be
        self._watch_thread = threading.Thread(target=self._watch, name="syncline-ray", daemon=True)
        self._watch_thread.start()

    def _trouble(self) -> str | None:
        if self._problem is not None or time.monotonic() < self._room_by:
            return self._problem
        self._room_by = math.inf
        if self._ray.util.placement_group_table(self._group)["state"] == "CREATED":
            return None  # there was room; it is the outposts that do not come
        count = self._group.bundle_count
        return (
            f"There is no room for {count} workers on this Ray cluster. {self._asked(count)} Ask for fewer --workers, "
            "or for less in each place (cpus=, gpus=), or give the cluster more room."
        )

    def _told_waiting(self, have: int, want: int) -> str:
        told = f"Waiting for {want - have} of {want} places for workers on Ray."
        return f"{told} {self._asked(want)}" if not have and self._wanted.lacks(want, self._free) else told

    def _dismiss(self) -> None:
        self._has_left.set()
        if self._watch_thread is not None:
            self._watch_thread.join()
        with contextlib.suppress(Exception):  # whatever Ray says now, what is left must be left
            for post in self._posts.values():
                self._ray.kill(post.actor, no_restart=True)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._connection.leave()

    # Actors

    def _post(self, seat: int) -> None:
        """Ask for an actor at this seat. Ray starts it as soon as there is room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self._ray.remote(
            num_cpus=self._wanted.bundle["CPU"], num_gpus=self._wanted.gpus, max_restarts=0, max_task_retries=0
        )(_Keeper)
        there = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=seat)
        actor = remote.options(scheduling_strategy=there, name=None).remote()
        future = actor.keep.remote(self.invitation.address, self.invitation.secret, seat, os.getcwd())
        self._posts[future] = _Post(seat, actor)

    def _watch(self) -> None:
        """See actors die, and ask for others."""
        try:
            while self._posts and not self._has_left.is_set():
                ended, _ = self._ray.wait(list(self._posts), num_returns=1, timeout=_LOOK_EVERY_S)
                for future in ended:
                    self._replace(future)
        except Exception as error:  # Ray has many, and any of them means that it cannot be asked any more
            self._problem = f"Ray starts no more places for workers: {_first_line(error)}"

    def _replace(self, future: Any) -> None:
        post = self._posts.pop(future)
        reason = self._why_ended(future)
        with contextlib.suppress(Exception):  # gone already, most often
            self._ray.kill(post.actor, no_restart=True)  # while it is there, its place is taken
        if self._is_closed:
            return
        self._lost(post.seat, f"was lost with its Ray actor ({reason})")
        deaths, now = self._deaths[post.seat], time.monotonic()
        deaths.append(now)
        if len(deaths) == _MOST_DEATHS and now - deaths[0] < _WITHIN_S:
            self._problem = f"{_MOST_DEATHS} Ray actors in a row did not live for long; the last: {reason}"
        else:
            self._post(post.seat)

    def _why_ended(self, future: Any) -> str:
        try:
            return str(self._ray.get(future))
        except self._ray.exceptions.RayTaskError as error:
            return _first_line(getattr(error, "cause", None) or error)
        except self._ray.exceptions.RayError as error:
            return _first_line(error)

    def _asked(self, count: int) -> str:
        return self._wanted.in_words(count, self._total, self._free)


@dataclass(frozen=True)
class _Post:
    """An actor, and the seat it was sent to."""

    seat: int
    actor: Any


class _Keeper:
    """The actor. Its process is an outpost, and nothing else."""

    def keep(self, address: str, secret: str, seat: int, folder: str) -> str:
        """Until the run is over; why it ended is returned."""
        # As if started by the driver: what it calls by a relative path, and its modules beside it, are found.
        if os.path.isdir(folder):
            os.chdir(folder)
        here = str(_import_ray().util.get_node_ip_address())
        return keep_outpost(Invitation(address=address, secret=secret), seat=seat, address=here)


# This process and Ray


class _Connection:
    """To a cluster that is there, or to one of our own, which is started by `open` and ended by `leave`."""

    def __init__(self, ray: Any, address: str | None) -> None:
        self._ray, self._folder = ray, ""
        self._is_ours = self.is_own_cluster = False
        self._auth = os.environ.get("RAY_AUTH_MODE")
        if ray.is_initialized():
            self._check_is(address)
        elif address is not None or (address := _address_from_environment()) is not None:
            if not _answers(address):
                raise ConfigError(f"No Ray cluster answers at {address}. {_JOINING}")
            self._join(address, address)
        elif (address := _started_here()) is not None and _answers(address):
            self._join(None, address)
        else:
            self.is_own_cluster = True
        self.host = _LOOPBACK if self.is_own_cluster else str(ray.util.get_node_ip_address())
        """The address of this machine, as the others in the cluster know it."""

    def open(self, *, cpus: int) -> None:
        """Start our own cluster, if there is none. Like the local engine it has room for any number of workers."""
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
                _system_config={"worker_niceness": 0},  # otherwise training gives way to everything else here
            )

    def leave(self) -> None:
        """Let go of Ray, if we took hold of it. Our own cluster ends with that."""
        if self._is_ours:
            self._ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._auth is None:  # Ray sets it for a cluster of its own, and forgets it there
            os.environ.pop("RAY_AUTH_MODE", None)
        self._is_ours, self._folder = False, ""

    def _join(self, address: str | None, shown: str) -> None:
        try:
            self._init(address=address)
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            self._ray.shutdown()
            raise ConfigError(
                f"The Ray cluster at {shown} cannot be joined: {_first_line(error)} {_JOINING}"
            ) from error

    def _init(self, **settings: Any) -> None:
        # Ray's own lines, and all that its processes print, stay in its logs: the terminal is for the run.
        settings |= {"logging_level": logging.ERROR, "log_to_driver": False}
        self._is_ours = True  # also if it fails half-way: then there is something to be taken away
        with _same_sigterm(), _without_listener():
            self._ray.init(**settings)

    def _check_is(self, address: str | None) -> None:
        """Ray is in use by this process already; that is as well, unless it is of another cluster."""
        ours = self._ray.get_runtime_context().gcs_address
        if address not in (None, ours):
            raise ConfigError(
                f"This process is connected to the Ray cluster at {ours}, and the run asks for the one at {address}. "
                "Write engine='ray' for the former, or call ray.shutdown() before."
            )


_JOINING = (
    "Write the address of the cluster's head as 'ray start' shows it, with the port of its GCS (6379 unless it was "
    "set; 10001 is for Ray Client, which is not enough for a driver), and start the run on a node of that cluster."
)


def _import_ray() -> Any:
    # Ray tells its makers what it is used for unless it is told not to; that is the user's to decide, by setting it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.placement_group
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError("Ray is not installed: pip install 'syncline[ray]'") from None
    return ray


def _address_from_environment() -> str | None:
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS={address} is the address of Ray Client. {_JOINING}")
    return None if address in ("auto", "local") else address


def _started_here() -> str | None:
    """The cluster that `ray start` has joined on this machine. Not one that another run has started for itself."""
    from ray._private import services  # Ray has no public way to ask without starting one

    if os.environ.get("RAY_ADDRESS") == "local":
        return None
    found = services.find_bootstrap_address(None)
    return None if found is None else str(found)


def _answers(address: str) -> bool:
    """Whether a server of gRPC is there. Ray itself would try for minutes, and print what it tries."""
    from ray._private import services

    host, _, port = address.rpartition(":")
    try:
        # On Linux, Ray goes to this machine's address in the network when it is told a loopback address.
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
    """Ray replaces a loopback address by that of a network, on Linux, and then listens on all of them.

    Where it does not is decided by this constant, meant for systems whose firewall asks the user.
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
    """Ray's `init` makes SIGTERM end the process; what it does is for the program to say."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _without_listener() -> Iterator[None]:
    """When a node dies, Ray prints the end of its log, whatever `log_to_driver` says. The run tells of it itself."""
    from ray._private import worker

    listen = worker.listen_error_messages
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = listen


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
