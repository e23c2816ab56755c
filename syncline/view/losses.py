"""Losses and recoveries in words: who was lost and why, who went on when, who is back.

Here: `Losses`, which follows a run's events, for every view and for the report. Not here: why a run failed
(`coordinator/cause.py`).
"""

from __future__ import annotations

import re

from syncline.telemetry.events import WentOn, WorkerLost
from syncline.view.words import count, duration, headline, size

__all__ = ["Losses"]

_LONGEST_MESSAGE = 200


class Losses:
    """Who is lost at the moment, and since when."""

    def __init__(self, workers: int = 0) -> None:
        self.lost_at: dict[int, float] = {}
        self._members = set(range(workers))
        self._untold: float | None = None  # when somebody was lost without whom nobody has gone on yet

    def on_lost(self, event: WorkerLost) -> str:
        """In words: who, why, when."""
        self.lost_at[event.rank] = event.time
        self._untold = self._untold or event.time
        then = "another takes its place" if event.is_replaced else "the others go on without it"
        if not event.detail:  # its last sign of life may be a few steps old
            return f"{event.name} {event.cause} after step {event.step}; {then}"
        message = _message_in(event.detail, kind=event.cause.removeprefix("raised "))
        return f"{event.name} {event.cause} at step {event.step}{f': {message}' if message else ''}; {then}"

    def on_went_on(self, event: WentOn) -> list[str]:
        """In words: how the workers went on, and who has come and gone."""
        members = set(event.members)
        before = self._members
        if self._untold is not None and event.time < self._untold:
            self._members = members
            return []  # news of before the loss, which was heard of sooner
        back = sorted(n for n in members if n in self.lost_at)
        new = sorted(members - before - set(back))
        lines = []
        # Nobody lost and nobody new: they have met again because one of them could not reach the others.
        is_meeting = self._untold is None and members == before
        if self._untold is not None or is_meeting:
            after = duration(max(0.0, event.time - self._untold) if self._untold is not None else event.seconds)
            how = f"step {event.step} redone"
            if event.redone:
                how = f"{count(event.redone, 'step')} back, from what was saved"
            elif event.made_up:
                how = f"{count(event.made_up, 'sample')} of the lost one done again"
            why = "a connection between workers broke; " if is_meeting else ""
            lines.append(f"{why}{count(len(members), 'worker')} went on after {after}, {how}")
        with_state = f", received {size(event.bytes_of_state)} of live state" if event.bytes_of_state else ""
        for number in back:
            since = duration(event.time - self.lost_at.pop(number))
            lines.append(f"worker {number} is back after {since}{with_state}")
        lines += [f"worker {number} has joined at step {event.step}{with_state}" for number in new]
        left = sorted(before - members - set(self.lost_at))
        lines += [f"worker {number} has left at step {event.step}" for number in left]
        self._members, self._untold = members, None
        return lines


def _message_in(detail: str, kind: str) -> str:
    """What an exception said, in a line. A traceback names its class before that, in full, which is told already."""
    said = re.sub(rf"^(?:[\w.]+\.)?{re.escape(kind)}(?:: |$)", "", headline(detail)).rstrip(".")
    return said if len(said) <= _LONGEST_MESSAGE else f"{said[:_LONGEST_MESSAGE]}..."
