"""Who takes part in a run: numbered Views, and what becomes of them when somebody is lost, joins or leaves.

Here: a pure state machine. Events in, decisions out; time comes in as a number. Not here: when the run as a whole ends
(`supervision.py`), acting on decisions (`coordinator.py`), what workers do on entering a View (`workers/`).

A process has a *number* for good: the workers first, then the servers of parameters, then workers that were added. Its
place in a View, its rank, is the place of its number among the members'. A process that replaces a lost one has its
number and another *life*; whatever is still heard of an earlier life is ignored.

    starting --ready--> ready --View--> member --lost--> starting (the next life), or gone
                                          `--View without it--> leaving --> gone
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Decision", "KillOne", "Launch", "Membership", "Policy", "Publish", "View"]

Policy = Literal["shrink-and-replace", "replace-only", "shrink", "stop"]
"""When a worker is lost: go on without it until its replacement is there; wait for its replacement (the result is the
same to the bit as without the loss, for synchronous gradients); go on without it for good; or end the run."""

_State = Literal["starting", "ready", "member", "leaving", "gone"]


@dataclass(frozen=True)
class View:
    """The members, by number, from now on; a member's rank is its place among them."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Publish:
    """Tell everybody of a View."""

    view: View


@dataclass(frozen=True)
class Launch:
    """Start a process."""

    number: int
    life: int


@dataclass(frozen=True)
class KillOne:
    """End one process now."""

    number: int


Decision = Publish | Launch | KillOne


@dataclass
class Membership:
    """Who takes part. At the start everybody does: View 1."""

    workers: int
    servers: int = 0
    policy: Policy = "shrink-and-replace"
    least: int = 1
    """With fewer workers than this the strategy means nothing: wait for replacements."""
    most_losses: int = 10
    within_s: float = 300.0
    """More losses than that in this time, and the run should not go on."""
    view: View = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(1, tuple(range(self.workers)))
        self._states: dict[int, _State] = dict.fromkeys(range(self.workers + self.servers), "member")
        self._lives: dict[int, int] = dict.fromkeys(self._states, 0)
        self._losses: deque[float] = deque()
        self._is_outdated = False  # something has changed since the last View
        self._replaces = self.policy in ("shrink-and-replace", "replace-only")

    def is_server(self, number: int) -> bool:
        """Whether this is a server of parameters."""
        return self.workers <= number < self.workers + self.servers

    def life_of(self, number: int) -> int:
        """Which life of this number is the present one."""
        return self._lives.get(number, -1)

    def is_here(self, number: int) -> bool:
        """Whether a process of this number is running, as far as is known."""
        return self._states.get(number, "gone") != "gone"

    @property
    def here(self) -> list[int]:
        """The numbers of all processes that are running."""
        return [n for n, state in self._states.items() if state != "gone"]

    @property
    def survivors(self) -> int:
        """How many workers hold the state of the run."""
        return sum(state == "member" for n, state in self._states.items() if not self.is_server(n))

    @property
    def has_workers(self) -> bool:
        """Whether there is a worker, or will be."""
        return any(s in ("starting", "ready", "member") for n, s in self._states.items() if not self.is_server(n))

    def too_many_losses(self, now: float) -> bool:
        """Whether more were lost lately than a run should put up with."""
        while self._losses and self._losses[0] < now - self.within_s:
            self._losses.popleft()
        return len(self._losses) > self.most_losses

    def on_lost(self, number: int, life: int, now: float, *, replace: bool = True) -> list[Decision]:
        """A process has ended that should not have."""
        if life != self.life_of(number) or self._states[number] == "gone":
            return []
        if self._states[number] == "leaving":
            self._states[number] = "gone"
            return []
        self._losses.append(now)
        self._is_outdated = True
        decisions: list[Decision] = []
        # Without its server's part of the parameters nobody can go on, whatever the policy says of workers.
        if replace and (self._replaces or self.is_server(number)):
            self._states[number] = "starting"
            self._lives[number] += 1
            decisions.append(Launch(number, self._lives[number]))
        else:
            self._states[number] = "gone"
        return [*decisions, *self._publish_if_complete()]

    def on_ready(self, number: int, life: int) -> list[Decision]:
        """A process that was started later is ready to become a member."""
        if life != self.life_of(number) or self._states[number] != "starting":
            return []
        self._states[number] = "ready"
        self._is_outdated = True
        return self._publish_if_complete()

    def on_stranded(self, view: int, now: float) -> list[Decision]:
        """In this View somebody has lost the line to the others: a new one, unless that is on its way."""
        if view != self.view.number or self.policy == "stop":
            return []
        was_outdated, self._is_outdated = self._is_outdated, True
        decisions = self._publish_if_complete()
        if decisions and not was_outdated:
            self._losses.append(now)  # that cannot go on for ever, either
        return decisions

    def on_left(self, number: int, life: int) -> None:
        """A process has ended as it should."""
        if life == self.life_of(number):
            self._states[number] = "gone"

    def add(self, count: int) -> list[Decision]:
        """Take more workers in."""
        first = max(self._states) + 1
        for number in range(first, first + count):
            self._states[number], self._lives[number] = "starting", 0
        return [Launch(number, 0) for number in range(first, first + count)]

    def remove(self, count: int) -> list[Decision]:
        """Let workers go, the newest first; never all of them, nor more than the strategy bears."""
        present = [n for n, s in self._states.items() if s in ("member", "ready") and not self.is_server(n)]
        going = sorted(present)[max(self.least, 1, len(present) - count) :]
        if not going:
            return []
        for number in going:
            self._states[number] = "leaving"
        self._is_outdated = True
        return self._publish_if_complete()

    def dismiss(self) -> list[Decision]:
        """Nobody joins any more: workers that are on the way are ended."""
        decisions: list[Decision] = []
        for number, state in self._states.items():
            if state in ("starting", "ready") and not self.is_server(number):
                self._states[number] = "gone"
                decisions.append(KillOne(number))
        return decisions

    def go_on_with_survivors(self) -> list[Decision]:
        """A View of those who are left, and nobody else."""
        decisions = self.dismiss()
        self._is_outdated = True
        return [*decisions, *self._publish_if_complete()]

    def _publish_if_complete(self) -> list[Decision]:
        if not self._is_outdated:
            return []
        of_workers = {n: s for n, s in self._states.items() if not self.is_server(n)}
        present = sorted(n for n, s in of_workers.items() if s in ("member", "ready"))
        is_awaited = [s == "starting" for n, s in self._states.items() if self.is_server(n)]
        if self.policy == "replace-only":
            is_awaited += [s == "starting" and n < self.workers for n, s in of_workers.items()]
        if any(is_awaited) or len(present) < max(self.least, 1):
            return []
        for number, state in self._states.items():
            if state == "ready":
                self._states[number] = "member"
        self._is_outdated = False
        self.view = View(self.view.number + 1, tuple(present))
        return [Publish(self.view)]
