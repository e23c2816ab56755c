"""A worker's membership in a run.

Here: `Session`: the link to the coordinator, the current View, this worker's rank in it, and the collective of its
members. `Session.connected` makes one for a worker of a run, `Session.alone` one for a script under plain python. Not
here: what is opened for a View (`transport.py`), checkpoints (`checkpoints.py`), and the order of a step
(`stepper.py`).

`worker_id` is a worker's permanent number in the run: messages, events and files name it. `rank` is its place among the
members of the current View: collectives and the division of samples use it. They differ after a shrink.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.comms.collective import Collective, Solo
from syncline.comms.control import LedgerLine, MeetingCall, Ready, Stranded, ViewOf
from syncline.compute.device import device_here
from syncline.compute.memory import Peak
from syncline.data.ledger import Line, RecentLines
from syncline.data.order import step_seed
from syncline.errors import PeerFailed
from syncline.layouts.grid import WorkerPlace
from syncline.layouts.layout import read_layout
from syncline.planning.plan import Plan, WorkerPlan
from syncline.strategies.reading import read_strategy
from syncline.telemetry.events import WarningMessage
from syncline.telemetry.recorder import Recorder
from syncline.telemetry.run_dir import RunDir
from syncline.workers.checkpoints import Checkpoints
from syncline.workers.link import Link
from syncline.workers.transport import open_collective, open_process_group, open_servers

if TYPE_CHECKING:
    from syncline.comms.parameter_server.client import ParameterServers

_ORPHAN_PATIENCE_S = 5.0
"""How long a worker without a driver waits for the others. Then one of them must have failed."""
_EQUAL_PATIENCE_S = 1.5
"""The same for workers with equal replicas. If the others were only slow, that does no harm: each of them can save."""
_STRANDED_S = 1.0
"""How long a worker that cannot reach its peers waits for a new View before it asks the coordinator for one."""


class Session:
    """One worker's membership in a run; `link` is None for a worker without a coordinator."""

    def __init__(self, plan: Plan, worker_id: int, recorder: Recorder, link: Link | None = None) -> None:
        self.plan = plan
        """The plan for the current View."""
        self._initial_plan = plan
        self.has_peers = plan.size > 1
        """Whether the run has several workers; this one may still be alone in a View."""
        self.worker_id = self.rank = worker_id
        self.members = [worker_id]
        """The worker_ids of the View's members, in the order of their ranks."""
        self.view = 0
        """The number of the current View; 0 before the first one."""
        self.recorder = recorder
        self.device = device_here(plan.workers[worker_id % plan.size].device)
        self.collective: Collective = Solo()
        self.until_view_ends = ExitStack()
        """What is open in the current View only: it is closed, last opened first, when this worker leaves the View."""
        self.after_report = ExitStack()
        """What the other workers notice of this one's failure. The coordinator hears of the reason first: the failures
        that follow from it may arrive sooner, and would be taken for the reason."""
        self.strategy, self.layout = read_strategy(plan.strategy), read_layout(plan.layout)
        self.place = WorkerPlace(self.layout.grid(plan.size), worker_id % plan.size, tuple(range(plan.size)))
        """This worker's place among the members of the View."""
        # Workers that train independently between exchanges must not wait for each other inside a forward pass.
        self.has_global_batch_norm = plan.batch_norm == "global" and self.strategy.method.is_lock_step
        # The workers of one replica train in step in any case.
        self.has_replica_batch_norm = plan.batch_norm == "global" and not self.has_global_batch_norm
        self.run_dir = RunDir(Path(link.files.run_dir)) if link is not None else None
        self.checkpoints = Checkpoints(self, link.files.checkpoint_path if link is not None else None)
        self.peak_memory = Peak(self.device)
        self.interrupted_at = time.monotonic()
        """When this worker noticed that its last View had ended."""
        self.in_flight: tuple[int, np.ndarray] = (0, np.empty(0, np.int64))
        """The step in progress and the indices of its samples, for failure reports."""
        self.save_alone: Callable[[], None] | None = None
        """Saves what this worker holds without the others, if that is complete; set by the `Stepper`."""
        self.launch_variables: list[str] = []
        """The environment variables that only a script for torchrun needs."""
        self.has_own_group = False
        """Whether the script has created a process group of torch.distributed of its own."""
        self._has_been_member = self._is_leaving = False
        self.link = link
        """The connection to the coordinator, if there is one."""
        author = f"{link.welcome.session}.{worker_id}.{link.life}" if link is not None else ""
        self.ledger_lines = RecentLines(author)
        self._servers: ParameterServers | None = None

    @classmethod
    def connected(cls, link: Link) -> Session:
        """The session of a worker that the coordinator has welcomed."""
        plan = Plan.from_dict(link.welcome.plan)
        torch.set_num_threads(plan.workers[link.worker_id % plan.size].threads)
        return cls(plan, link.worker_id, link.recorder, link)

    @classmethod
    def alone(cls) -> Session:
        """The session of a script that runs under plain python: one worker, no coordinator."""
        worker = WorkerPlan(rank=0, host="localhost", device="cpu", threads=torch.get_num_threads())
        return cls(_plan_of_one(worker), 0, Recorder(0))

    def join_view(self) -> bool:
        """Join the newest View as soon as there is one. False if this worker is no longer a member.

        Also False if the driver is gone and a worker failed; then this worker has saved what it holds, if it can.
        Raises `PeerFailed` if the run has failed, or if no View arrives in time.
        """
        link = self.link
        if link is None:
            return True
        self.interrupted_at = time.monotonic()
        if link.welcome.view is None and self.view == 0:
            link.send(Ready(self.worker_id, link.life))  # a late joiner: the coordinator includes it in the next View
        while True:
            view = self._wait_for_view(link)
            if view is None:
                self.collective.abort()  # so that no other worker waits for this one
                self.checkpoints.finish_writing()
                if self.save_alone is not None and self._has_been_member:
                    self.save_alone()
                return False
            self.until_view_ends.close()
            self.view = view.number
            if self.worker_id not in view.members:
                if self._has_been_member:
                    return False
                continue  # the View was decided before this worker was ready
            self.plan = self._initial_plan.with_members(view.members)
            self.rank, self.members = view.members.index(self.worker_id), list(view.members)
            self.place = WorkerPlace(self.layout.grid(len(self.members)), self.rank, tuple(self.members))
            try:
                self.collective = open_collective(self.plan, link, view, self.rank)
                break
            except PeerFailed:
                continue  # another worker failed meanwhile; a newer View follows
        self.until_view_ends.callback(lambda: self.collective.close())
        link.guard(self.collective, view.number)
        is_equal = self.strategy.method.recovery == "equal"
        link.orphan_patience_s = _EQUAL_PATIENCE_S if is_equal else _ORPHAN_PATIENCE_S
        self._has_been_member = True
        return True

    def _wait_for_view(self, link: Link) -> ViewOf | None:
        """The next View; None if the driver is gone, which would have announced it."""
        deadline = time.monotonic() + self.plan.exchange_timeout_s
        while time.monotonic() < deadline and not link.is_aborted:
            if link.is_driver_gone:
                return None
            view = link.next_view(self.view, _STRANDED_S)
            if view is not None:
                return view
            if link.is_driver_gone:
                return None
            if self._has_been_member:
                # All members may be alive, with only a connection between two of them broken: ask for a new View.
                link.send(Stranded(self.worker_id, link.life, self.view))
        if link.is_aborted:
            raise PeerFailed("The run has failed on another worker.", code="run-failed")
        raise PeerFailed(
            f"Timed out after {self.plan.exchange_timeout_s:g} s waiting for the coordinator's new view.",
            code="no-view",
            worker_id=self.worker_id,
            view=self.view,
        )

    def check_membership(self) -> None:
        """Raise `PeerFailed` if the coordinator has announced a newer View.

        Asynchronous workers do not wait for each other, so they would not notice otherwise.
        """
        if self.link is not None and self.link.is_outdated(self.view):
            raise PeerFailed("The membership has changed: a worker failed, joined or left.")

    def seed_step(self, step: int, rank: int) -> None:
        """Make all randomness in a step a function of (seed, step, rank) alone; `rank` is that of the share."""
        seed = step_seed(self.plan.seed, step, rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    def stop_requested(self) -> bool:
        """Whether the user or the engine has asked the run to stop."""
        return self.link is not None and self.link.stop_requested

    def save_requested(self) -> bool:
        return self.checkpoints.is_due()

    def call_meeting(self, number: int) -> None:
        """Send the call for meeting `number` to all workers."""
        if self.link is not None:
            self.link.send(MeetingCall(self.worker_id, self.view, number))

    def meeting_called(self, number: int) -> bool:
        """Whether any worker has called meeting `number`; a worker without a coordinator meets at once."""
        return self.link is None or self.link.last_meeting >= (self.view, number)

    def expect_long_waits(self) -> None:
        """From now on a wait for the others says nothing: one of them writes the last checkpoint."""
        if self.link is not None:
            self.link.orphan_patience_s = math.inf

    def add_to_ledger(self, line: Line) -> None:
        if self.link is not None:
            self.link.send(LedgerLine(self.worker_id, self.ledger_lines.add(line, time.monotonic())))

    def warn(self, message: str) -> None:
        """Show a warning to the user, once for all workers."""
        if self.rank == 0:
            self.recorder.emit(WarningMessage(message=message))

    def warn_of_worker(self, message: str) -> None:
        """Show a warning about this worker to the user."""
        self.recorder.emit(WarningMessage(worker_id=self.worker_id, message=message))

    def open_servers(self) -> ParameterServers:
        """The connection to the parameter servers, which all strategies of a run share."""
        assert self.link is not None, "a script under plain python has a plan without servers"
        if self._servers is None:
            self._servers = open_servers(self.plan, self.link, self.view, self.place)
            self.until_view_ends.callback(self._close_servers)
        return self._servers

    def _close_servers(self) -> None:
        """Say goodbye only at the end of the run: until then the servers expect this worker in the next View."""
        assert self._servers is not None, "called once for each connection"
        self._servers.close(goodbye=self._is_leaving)
        self._servers = None

    def fall_back_to_process_group(self, reason: str) -> None:
        """Use torch.distributed instead of shared memory; all members call this together."""
        assert self.link is not None, "only shared memory runs out, and a worker without a coordinator has none"
        self.warn(f"Too little shared memory ({reason}): exchanging through torch.distributed, which is slower.")
        self.collective = open_process_group(self.plan, self.link, self.view, self.rank)
        self.link.guard(self.collective, self.view)

    def gather_peak_memory(self) -> dict[str, int]:
        """The peak memory of every member in bytes, by worker_id; all members call this together."""
        gathered = self.collective.all_gather(str(self.peak_memory.read()).encode())
        return {str(worker_id): int(peak) for worker_id, peak in zip(self.members, gathered, strict=True)}

    def close(self) -> None:
        """Leave the run at its end."""
        self._is_leaving = True
        if self.plan.servers and self.place.is_leader:
            self.open_servers()  # even if the strategy never did: a server ends when every worker has said goodbye
        self.until_view_ends.close()


def _plan_of_one(worker: WorkerPlan) -> Plan:
    from syncline.config.run import RunConfig
    from syncline.planning.machine import Machine
    from syncline.planning.planner import TaskFacts, make_plan

    facts = TaskFacts(kind="own-loop", model="script", data="script", fingerprint="")
    plan = make_plan(facts, RunConfig(workers=1, device="cpu"), Machine.here())
    return replace(plan, workers=(worker,))
