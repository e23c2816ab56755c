"""Worker failures, recoveries and stragglers as sentences, the same in every view and in the report.

Here: `FailureLog` and `StragglerLog`, which follow a run's events. Not here: why a run failed
(`coordinator/root_cause.py`), or which worker counts as slow (`coordinator/stragglers.py`).
"""

from __future__ import annotations

import re

from syncline.observe.formatting import count, duration, headline, size
from syncline.telemetry.events import GroupTrains, Recovered, WorkerFailure, WorkerSlow

_LONGEST_MESSAGE = 200
_PHASES = {
    "data": "loading data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "update": "the optimizer update",
    "compute": "forward and backward",
}


class FailureLog:
    """The workers that are down at the moment, and since when."""

    def __init__(self, workers: int = 0) -> None:
        self._down_since: dict[int, float] = {}
        self._members = set(range(workers))
        self._pending_since: float | None = None  # the first failure that the others have not recovered from

    def on_failure(self, event: WorkerFailure) -> str:
        self._down_since[event.worker_id] = event.time
        self._pending_since = self._pending_since or event.time
        then = "starting a replacement" if event.is_replaced else f"continuing with {count(event.workers, 'worker')}"
        if event.restarts_all:  # of its steps nothing is known
            message = _exception_message(event.detail, kind=event.cause.removeprefix("raised ")) if event.detail else ""
            return f"{event.name} {event.cause}{f': {message}' if message else ''}; starting the script again"
        if not event.detail:  # "after": its last heartbeat may be a few steps old
            return f"{event.name} {event.cause} after step {event.step}; {then}"
        message = _exception_message(event.detail, kind=event.cause.removeprefix("raised "))
        return f"{event.name} {event.cause} at step {event.step}{f': {message}' if message else ''}; {then}"

    def on_recovery(self, event: Recovered) -> list[str]:
        """How the workers continued, and which of them joined or left."""
        members, before = set(event.members), self._members
        if self._pending_since is not None and event.time < self._pending_since:
            self._members = members
            return []  # from before the failure; the failure arrived first
        rejoined = sorted(n for n in members if n in self._down_since)
        joined = sorted(members - before - set(rejoined))
        lines = []
        # With the same members as before, the View changed because a worker could not reach the others.
        is_reconnect = self._pending_since is None and members == before
        if self._pending_since is not None or is_reconnect:
            pause_s = event.seconds if self._pending_since is None else max(0.0, event.time - self._pending_since)
            how = f"repeating step {event.step}"
            if event.repeated_steps:
                how = f"{count(event.repeated_steps, 'step')} back at the last checkpoint"
            elif event.repeated_samples:
                how = f"repeating {count(event.repeated_samples, 'sample')} of the failed worker"
            why = "a connection between workers broke; " if is_reconnect else ""
            lines.append(f"{why}{count(len(members), 'worker')} continued after {duration(pause_s)}, {how}")
        state = f", received {size(event.state_bytes)} of live state" if event.state_bytes else ""
        for worker_id in rejoined:
            down_s = event.time - self._down_since.pop(worker_id)
            lines.append(f"worker {worker_id} rejoined after {duration(down_s)}{state}")
        lines += [f"worker {worker_id} joined at step {event.step}{state}" for worker_id in joined]
        left = sorted(before - members - set(self._down_since))
        lines += [f"worker {worker_id} left at step {event.step}" for worker_id in left]
        self._members, self._pending_since = members, None
        return lines

    def on_group(self, event: GroupTrains) -> list[str]:
        """How the script was started again, after a failure."""
        since, self._pending_since = self._pending_since, None
        self._down_since.clear()
        self._members = set(event.members)
        if since is None:
            return []
        return [f"{count(len(event.members), 'worker')} started the script again, {duration(event.time - since)} later"]


class StragglerLog:
    """The workers that are slow at the moment, and those that were."""

    def __init__(self) -> None:
        self._slow_since: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._worst: dict[int, float] = {}

    def on_slow(self, event: WorkerSlow) -> str:
        """How much slower the worker is than the others, and in which phase."""
        if not event.is_slow:
            self.on_end(event.worker_id, event.time)
            return f"worker {event.worker_id} is as fast as the others again"
        self._slow_since[event.worker_id] = event.time
        factor = event.work_s / event.median_s if event.median_s else float("inf")
        self._worst[event.worker_id] = max(self._worst.get(event.worker_id, 0.0), factor)
        phase = _PHASES.get(event.slowest_phase, event.slowest_phase)
        return (
            f"worker {event.worker_id} is slow: {duration(event.work_s)} per step, the others "
            f"{duration(event.median_s)}; most of the difference is in {phase}"
        )

    def on_end(self, worker_id: int, time: float) -> None:
        """The worker is no longer slow, or has failed."""
        if worker_id in self._slow_since:
            self._seconds[worker_id] = self._seconds.get(worker_id, 0.0) + time - self._slow_since.pop(worker_id)

    def summary(self, now: float) -> list[str]:
        """At the end of the run, one line per worker that was slow."""
        for worker_id in list(self._slow_since):
            self.on_end(worker_id, now)
        return [
            f"worker {worker_id} was slow for {duration(seconds)}: "
            f"up to {self._worst[worker_id]:.1f} times the others' time per step"
            for worker_id, seconds in sorted(self._seconds.items())
        ]


def _exception_message(detail: str, kind: str) -> str:
    """The message of an exception on one line, without the class name that a traceback puts before it."""
    message = re.sub(rf"^(?:[\w.]+\.)?{re.escape(kind)}(?:: |$)", "", headline(detail)).rstrip(".")
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
