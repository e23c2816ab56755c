"""Workers on a Ray cluster: each slot is an actor that runs a node agent.

Here: `RayEngine`, which starts actors and replaces those that die, and `read_name`, the syntax of --engine ray... Not
here: the connection of this process to Ray (`ray_connection.py`), what an actor does (`remote/agent.py`), and the
driver's end of it (`remote/engine.py`).

Ray provides processes on machines, and reports when one has died. Tensors do not pass through it: 100 MB through its
object store take a tenth of a second or more. Nor does Ray restart anything by itself: replacing workers is up to the
coordinator.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import Any

from syncline.engines.ray_connection import RayConnection, first_line, import_ray
from syncline.engines.remote.agent import run_node_agent
from syncline.engines.remote.engine import RemoteEngine
from syncline.engines.remote.messages import Invitation
from syncline.errors import ConfigError, plural
from syncline.planning.machine import Machine

_WAIT_S = 120.0
_LOOK_EVERY_S = 0.5
_MOST_DEATHS, _WITHIN_S = 3, 60.0
"""After this many dead actors in one slot within this time, no more are started: they would die, too."""
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
        self._ray = import_ray()
        self._connection = RayConnection(self._ray, self._request.address)
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
            self._problem = f"Ray cannot start more workers: {first_line(error)}"

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
            return first_line(getattr(error, "cause", None) or error)
        except self._ray.exceptions.RayError as error:
            return first_line(error)

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
        here = str(import_ray().util.get_node_ip_address())
        return run_node_agent(Invitation(address=address, secret=secret), slot=slot, address=here)
