"""An engine whose workers run wherever node agents are.

Here: `RemoteEngine`, the base of the Ray, Spark and attach engines. Not here: the agents that are connected and their
workers (`agent_pool.py`), and the agents themselves (`agent.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from syncline.comms.control import LaunchSpec, RunFiles
from syncline.engines.engine import Exit
from syncline.engines.network import Network
from syncline.engines.remote.agent_pool import AgentPool
from syncline.engines.remote.messages import Invitation
from syncline.errors import SynclineError
from syncline.planning.machine import Machine

_SHUTDOWN_S = 12.0
_TICK_S = 0.25


class RemoteEngine:
    """An `Engine` of node agents that connect to `host`. A subclass starts them in `_start_agents`."""

    def __init__(
        self, host: str, *, port: int | None = None, secret: str | None = None, limit_s: float = 300.0
    ) -> None:
        """Listen for agents at `host` and `port`; by default on a free port and with a new secret.

        Agents must connect within `limit_s`.
        """
        self._limit_s = limit_s
        secret = secret or secrets.token_hex(32)
        self._pool = AgentPool(host, port, secret)
        self.invitation = Invitation(address=self._pool.address, secret=secret)
        """What an agent needs to connect."""
        self._network: Network | None = None
        self._is_closed = False

    # For subclasses

    def _start_agents(self, count: int) -> None:
        """Have this many agents started. Does not wait for them."""

    def _startup_problem(self) -> str | None:
        """Why no more agents will connect, if that is so."""
        return None

    def _stop_agents(self) -> None:
        """All agents were asked to shut down: end what started them."""

    def _waiting_message(self, have: int, want: int) -> str:
        """What the user reads while agents start."""
        return f"Waiting for {want - have} of {want} workers' nodes."

    # The engine protocol

    def reserve(self, workers: int, report: Callable[[str], None]) -> None:
        """Wait until there is an agent for each worker. Before that, `network` and `machine` are not known."""
        if self._network is not None:
            return
        self._start_agents(workers)
        deadline, reported, reported_rejections = time.monotonic() + self._limit_s, -1, 0
        while (network := self._pool.assign_slots(workers)) is None:
            have, rejections = len(self._pool), self._pool.rejections[reported_rejections:]
            for reason in rejections:
                report(reason)
            reported_rejections += len(rejections)
            if have != reported:
                report(self._waiting_message(have, workers))
                reported = have
            if (problem := self._startup_problem()) is not None:
                raise SynclineError(problem, code="no-nodes", workers=workers, nodes=have)
            if time.monotonic() > deadline:
                rejected = f" Rejected: {self._pool.rejections[-1]}" if self._pool.rejections else ""
                raise SynclineError(
                    f"Only {have} of {workers} node agents connected within {self._limit_s:g} s.{rejected} Use fewer "
                    "--workers, or add nodes to the cluster.",
                    code="no-nodes", workers=workers, nodes=have,
                )  # fmt: skip
            self._pool.wait_for_change(_TICK_S)
        self._network = network

    @property
    def network(self) -> Network:
        """Where the processes are, and where they reach the coordinator."""
        assert self._network is not None, "`reserve` comes first"
        return self._network

    @property
    def machine(self) -> Machine:
        return self._pool.machine()

    def provide(self, files: RunFiles) -> None:
        """Remember the files to send to nodes that do not share the driver's file system."""
        self._pool.files = files

    def launch(self, spec: LaunchSpec, log: Path) -> None:
        self._pool.launch(spec, log)

    def poll(self) -> list[Exit]:
        return self._pool.take_exits()

    def problems(self) -> list[str]:
        problems = self._pool.problems
        return [problems.popleft() for _ in range(len(problems))]

    def kill(self, worker_id: int | None = None) -> None:
        self._pool.kill(worker_id)

    def close(self) -> None:
        """Shut all agents down, and wait until they have left."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pool.close(_SHUTDOWN_S)
        self._stop_agents()
        self._pool.release()

    def fileno(self) -> int:
        """Readable when a worker has ended."""
        return self._pool.has_exits
