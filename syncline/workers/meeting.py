"""Agreement among workers of an asynchronous strategy.

With a synchronous strategy, everything that workers must agree on is piggybacked on the exchange. Asynchronous workers
are at different steps, so there is no such exchange. When one of them requests a stop or a checkpoint, or all must be
at the same step (the end of an epoch), they meet:

    1. A worker with a request calls a meeting. The coordinator passes the call on to all workers.
    2. Each worker, at the end of its current step, gathers the number of steps that every worker has done.
    3. The most advanced worker waits; the others continue to the same step. There, all are together.

Here: `Meeting`, one worker's side of it. Not here: how a call travels (`link.py`, `coordinator/`), and what is done at
the meeting. It cannot deadlock: a worker that its strategy holds back (a bound on staleness) attends meetings while it
waits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

from syncline.comms.collective import Collective

_REPORT = struct.Struct("<Q??")
_POLL_S = 0.02
"""How often a worker that its strategy holds back checks for calls."""


class Requests(Protocol):
    """This worker's requests to stop or save, and the calls for meetings."""

    def stop_requested(self) -> bool:
        """Whether the run should stop."""

    def save_requested(self) -> bool:
        """Whether a checkpoint is due."""

    def call_meeting(self, number: int) -> None:
        """Send the call for meeting `number` to all workers."""

    def meeting_called(self, number: int) -> bool:
        """Whether any worker has called meeting `number`."""


class Agreement(NamedTuple):
    """The result of a meeting."""

    stop: bool
    save: bool


class Meeting:
    """One worker's side of all meetings of a View."""

    def __init__(self, collective: Collective, requests: Requests) -> None:
        self._collective, self._requests = collective, requests
        self._number = 0  # of the next meeting
        self._last_called = -1
        self._goal: int | None = None  # the step at which all workers will be together
        self._agreed = Agreement(False, False)

    def after_step(self, step: int, *, must: bool, may_continue: Callable[[float], bool]) -> Agreement | None:
        """After `step` steps: the agreement if all workers are together now, None if this one may continue.

        With `must`, all workers meet here, so none is ever further than this.
        """
        while True:
            if self._goal is None and (must or self._is_called()):
                self._meet(step)
            if self._goal == step:
                self._goal = None
                # Others may still be on their way; without the barrier, this worker could pass its staleness bound.
                self._collective.barrier()
                return self._agreed
            assert self._goal is None or self._goal > step, f"at step {step}, beyond the meeting at {self._goal}"
            if may_continue(_POLL_S):
                return None

    def _is_called(self) -> bool:
        requests = self._requests
        if self._last_called < self._number and (requests.stop_requested() or requests.save_requested()):
            self._last_called = self._number
            requests.call_meeting(self._number)
        return requests.meeting_called(self._number)

    def _meet(self, step: int) -> None:
        mine = _REPORT.pack(step, self._requests.stop_requested(), self._requests.save_requested())
        reports = [_REPORT.unpack(part) for part in self._collective.all_gather(mine)]
        self._number += 1
        self._goal = max(at for at, _, _ in reports)
        self._agreed = Agreement(any(stop for _, stop, _ in reports), any(save for _, _, save in reports))


def coded(agreed: Agreement | None) -> int:
    """The result of `after_step` as a number, for workers that do what another one has agreed to."""
    return 0 if agreed is None else 1 + agreed.stop + 2 * agreed.save


def decoded(number: int) -> Agreement | None:
    """What `coded` made a number of."""
    return Agreement(bool(number - 1 & 1), bool(number - 1 & 2)) if number else None
