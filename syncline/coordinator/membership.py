"""Membership of a run: numbered Views, and how they change when a worker fails, joins or leaves.

Here: a pure state machine. Events in, decisions out; time is passed in as a number. Not here: when the run as a whole
ends (`supervision.py`), acting on decisions (`coordinator.py`), what workers do on entering a View (`workers/`).

A process keeps its *worker_id* for the whole run: workers come first, then parameter servers, then workers that were
added later. Its *rank* is its position among the members of the current View. A replacement has the worker_id of the
failed process and the next *life*; messages from an earlier life are ignored.

    starting --ready--> ready --View--> member --failed--> starting (the next life), or gone
                                          `--View without it--> leaving --> gone

A script may train with torch.distributed itself, whose process groups cannot change their members. When one of its
workers fails, all of them restart: the others are killed, too, and the next View has all of them in new processes.

    member --another one failed--> restarting --its process has ended--> starting (the next life)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["shrink-and-replace", "replace-only", "shrink", "stop"]
"""What happens when a worker fails: continue without it until its replacement joins; wait for the replacement (then
synchronous gradients give the same bits as without the failure); continue without it; or stop the run."""

_State = Literal["starting", "ready", "member", "restarting", "leaving", "gone"]


@dataclass(frozen=True)
class View:
    """The members, by worker_id; a member's rank is its position among them."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class PublishView:
    """Send a new View to all processes."""

    view: View


@dataclass(frozen=True)
class StartProcess:
    """Start a worker or a parameter server."""

    worker_id: int
    life: int


@dataclass(frozen=True)
class KillProcess:
    """Kill one process now."""

    worker_id: int


Decision = PublishView | StartProcess | KillProcess


@dataclass
class Membership:
    """The states of all processes. At the start every worker is a member of View 1."""

    workers: int
    servers: int = 0
    policy: Policy = "shrink-and-replace"
    least: int = 1
    """The fewest workers that the strategy can train with; below that, wait for replacements."""
    max_failures: int = 10
    within_s: float = 300.0
    """With more than `max_failures` failures in this time, the run should stop."""
    restarts_together: bool = False
    """Whether all workers restart when one of them fails."""
    view: View = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(1, tuple(range(self.workers)))
        self._states: dict[int, _State] = dict.fromkeys(range(self.workers + self.servers), "member")
        self._lives: dict[int, int] = dict.fromkeys(self._states, 0)
        self._failures: deque[float] = deque()
        self._is_outdated = False  # a state has changed since the last View
        self._replaces = self.policy in ("shrink-and-replace", "replace-only")

    def is_server(self, worker_id: int) -> bool:
        """Whether this is a parameter server."""
        return self.workers <= worker_id < self.workers + self.servers

    def life_of(self, worker_id: int) -> int:
        """The current life of this process; earlier ones are dead."""
        return self._lives.get(worker_id, -1)

    def is_running(self, worker_id: int) -> bool:
        """Whether this process is running, as far as is known."""
        return self._states.get(worker_id, "gone") != "gone"

    def is_restarting(self, worker_id: int) -> bool:
        """Whether this process is being killed because another one failed."""
        return self._states.get(worker_id) == "restarting"

    @property
    def running(self) -> list[int]:
        """The worker_ids of all processes that are running."""
        return [n for n, state in self._states.items() if state != "gone"]

    @property
    def survivors(self) -> int:
        """How many workers hold the state of the run."""
        return sum(state == "member" for n, state in self._states.items() if not self.is_server(n))

    @property
    def has_workers(self) -> bool:
        """Whether any worker is running or starting."""
        present = ("starting", "ready", "member", "restarting")
        return any(s in present for n, s in self._states.items() if not self.is_server(n))

    def too_many_failures(self, now: float) -> bool:
        while self._failures and self._failures[0] < now - self.within_s:
            self._failures.popleft()
        return len(self._failures) > self.max_failures

    def on_failure(
        self, worker_id: int, life: int, now: float, *, replace: bool = True, ended: Collection[int] = ()
    ) -> list[Decision]:
        """A process has ended that should not have; `ended` are all that have ended, as they should or not."""
        if life != self.life_of(worker_id) or self._states[worker_id] == "gone":
            return []
        if self.is_restarting(worker_id):
            return self._start_again(worker_id)
        if self._states[worker_id] == "leaving":
            self._states[worker_id] = "gone"
            return []
        self._failures.append(now)
        self._is_outdated = True
        decisions = self._restart_members(ended, besides=worker_id) if self.restarts_together and replace else []
        # A parameter server holds a part of the model, so it is replaced whatever the policy for workers is.
        if replace and (self._replaces or self.is_server(worker_id)):
            decisions += self._start_again(worker_id)
        else:
            self._states[worker_id] = "gone"
        return [*decisions, *self._publish_if_complete()]

    def on_ready(self, worker_id: int, life: int) -> list[Decision]:
        """A process that was started later is ready to become a member."""
        if life != self.life_of(worker_id) or self._states[worker_id] != "starting":
            return []
        self._states[worker_id] = "ready"
        self._is_outdated = True
        return self._publish_if_complete()

    def on_stranded(self, view: int, now: float) -> list[Decision]:
        """A worker lost its connection to the others in this View: publish a new one, unless one is on its way."""
        if view != self.view.number or self.policy == "stop":
            return []
        was_outdated, self._is_outdated = self._is_outdated, True
        decisions = self._publish_if_complete()
        if decisions and not was_outdated:
            self._failures.append(now)  # a network that keeps breaking must end the run, too
        return decisions

    def on_group_created(self, worker_id: int, view: int) -> list[Decision]:
        """The script of this worker trains with torch.distributed itself, with the members of this View.

        So all must be there. If some have failed before, all restart: also a replacement that has started its script
        before it joined, as one of a user's own loop does.
        """
        self.restarts_together = True
        workers = {n: s for n, s in self._states.items() if not self.is_server(n)}
        if view == self.view.number and not any(s in ("starting", "ready") for s in workers.values()):
            return []
        self._is_outdated = True
        decisions = self._restart_members(())
        if self._states[worker_id] in ("starting", "ready"):
            self._states[worker_id] = "restarting"
            decisions.append(KillProcess(worker_id))
        return decisions

    def resize(self, change: int) -> list[Decision]:
        """Add workers, or remove the newest ones; the strategy's minimum always stays."""
        if self.restarts_together:
            return []  # the script would have to start again
        if change < 0:
            return self._remove(-change)
        first = max(self._states) + 1
        added = range(first, first + change)
        for worker_id in added:
            self._states[worker_id], self._lives[worker_id] = "starting", 0
        return [StartProcess(worker_id, 0) for worker_id in added]

    def _restart_members(self, ended: Collection[int], besides: int | None = None) -> list[Decision]:
        decisions: list[Decision] = []
        for worker_id, state in self._states.items():
            if state != "member" or worker_id == besides or self.is_server(worker_id):
                continue
            if worker_id in ended:
                decisions += self._start_again(worker_id)
            else:
                self._states[worker_id] = "restarting"
                decisions.append(KillProcess(worker_id))
        return decisions

    def _start_again(self, worker_id: int) -> list[Decision]:
        self._states[worker_id] = "starting"
        self._lives[worker_id] += 1
        return [StartProcess(worker_id, self._lives[worker_id])]

    def _remove(self, count: int) -> list[Decision]:
        present = [n for n, s in self._states.items() if s in ("member", "ready") and not self.is_server(n)]
        leaving = sorted(present)[max(self.least, 1, len(present) - count) :]
        if not leaving:
            return []
        for worker_id in leaving:
            self._states[worker_id] = "leaving"
        self._is_outdated = True
        return self._publish_if_complete()

    def dismiss_joining(self) -> list[Decision]:
        """Kill the workers that have not joined yet."""
        decisions: list[Decision] = []
        for worker_id, state in self._states.items():
            if state in ("starting", "ready") and not self.is_server(worker_id):
                self._states[worker_id] = "gone"
                decisions.append(KillProcess(worker_id))
        return decisions

    def keep_survivors(self) -> list[Decision]:
        """A View of the current members alone."""
        decisions = self.dismiss_joining()
        self._is_outdated = True
        return [*decisions, *self._publish_if_complete()]

    def _publish_if_complete(self) -> list[Decision]:
        if not self._is_outdated:
            return []
        of_workers = {n: s for n, s in self._states.items() if not self.is_server(n)}
        present = sorted(n for n, s in of_workers.items() if s in ("member", "ready"))
        is_awaited = [s == "starting" for n, s in self._states.items() if self.is_server(n)]
        if self.restarts_together:
            is_awaited += [s in ("starting", "restarting") for s in of_workers.values()]
        if self.policy == "replace-only":
            is_awaited += [s == "starting" and n < self.workers for n, s in of_workers.items()]
        if any(is_awaited) or len(present) < max(self.least, 1):
            return []
        for worker_id, state in self._states.items():
            if state == "ready":
                self._states[worker_id] = "member"
        self._is_outdated = False
        self.view = View(self.view.number + 1, tuple(present))
        return [PublishView(self.view)]
