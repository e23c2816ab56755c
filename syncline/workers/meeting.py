"""Agreement among workers that go each at its own pace.

In a synchronous strategy everything that all must agree on rides with the exchange. Where each worker is at a step of
its own, there is no such exchange; so when somebody has a wish (to stop, to save), or all must be at one place (the end
of an epoch), the workers are called together:

    1. Whoever has a wish calls a meeting. Everybody hears of it within moments, through the coordinator.
    2. Each worker, at the end of the step it is in, says how many steps it has done, and hears the others.
    3. The furthest stays where it is; the others go on to the same step. There, all are together.

Here: `Meeting`, the worker's side of it. Not here: how a call travels (`link.py`, `coordinator/`), and what is done
when all are together. Nobody waits for a worker that waits for it: a worker that is held up by its strategy (the gate
of a stale-synchronous one) attends meetings while it waits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

from syncline.comms.collective import Collective

__all__ = ["Agreement", "Calls", "Meeting"]

_PLACE = struct.Struct("<Q??")
_POLL_S = 0.02
"""How long a worker that is held up looks away from the calls."""


class Calls(Protocol):
    """This worker's wishes, and the calls that everybody hears."""

    def stop_wanted(self) -> bool:
        """Whether the run should end."""

    def save_wanted(self) -> bool:
        """Whether it is time for a checkpoint."""

    def call_meeting(self, number: int) -> None:
        """Let everybody know that meeting `number` is called."""

    def meeting_called(self, number: int) -> bool:
        """Whether somebody has called meeting `number`."""


class Agreement(NamedTuple):
    """What all workers know when they are together."""

    stop: bool
    save: bool


class Meeting:
    """One worker's attendance."""

    def __init__(self, collective: Collective, calls: Calls) -> None:
        self._collective, self._calls = collective, calls
        self._number = 0  # of the next meeting
        self._has_called = -1
        self._goal: int | None = None
        self._agreed = Agreement(False, False)

    def after_step(self, step: int, *, must: bool, may_go_on: Callable[[float], bool]) -> Agreement | None:
        """When this worker has done `step` steps: the agreement if all are together now, None if it may go on.

        With `must` all workers come together here, so nobody is ever further than this.
        """
        while True:
            if self._goal is None and (must or self._is_called()):
                self._meet(step)
            if self._goal == step:
                self._goal = None
                # The others may be on their way here still, and whoever went on now would pass its gate unasked.
                self._collective.barrier()
                return self._agreed
            assert self._goal is None or self._goal > step, f"at step {step}, beyond the meeting at {self._goal}"
            if may_go_on(_POLL_S):
                return None

    def _is_called(self) -> bool:
        calls = self._calls
        if self._has_called < self._number and (calls.stop_wanted() or calls.save_wanted()):
            self._has_called = self._number
            calls.call_meeting(self._number)
        return calls.meeting_called(self._number)

    def _meet(self, step: int) -> None:
        mine = _PLACE.pack(step, self._calls.stop_wanted(), self._calls.save_wanted())
        places = [_PLACE.unpack(part) for part in self._collective.gather(mine)]
        self._number += 1
        self._goal = max(at for at, _, _ in places)
        self._agreed = Agreement(any(stop for _, stop, _ in places), any(save for _, _, save in places))
