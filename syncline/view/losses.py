"""Losses and recoveries in words: who was lost and why, who went on when, who is back.

Here: `Losses`, which follows a run's events, for every view and for the report. Not here: why a run failed
(`coordinator/cause.py`).
"""

from __future__ import annotations

from syncline.telemetry.events import WentOn, WorkerLost
from syncline.view.words import count, duration, size

__all__ = ["Losses"]


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
        return f"{event.name} {event.cause} at step {event.step}; {then}"

    def on_went_on(self, event: WentOn) -> list[str]:
        """In words: how the workers went on, and who has come and gone."""
        members = set(event.members)
        before = self._members
        back = sorted(n for n in members if n in self.lost_at)
        new = sorted(members - before - set(back))
        lines = []
        if self._untold is not None:
            after = duration(max(0.0, event.time - self._untold))
            how = f"step {event.step} redone"
            if event.redone:
                how = f"{count(event.redone, 'step')} back, from what was saved"
            elif event.made_up:
                how = f"{count(event.made_up, 'sample')} of the lost one done again"
            lines.append(f"{count(len(members), 'worker')} went on after {after}, {how}")
        with_state = f", received {size(event.bytes_of_state)} of live state" if event.bytes_of_state else ""
        for number in back:
            since = duration(event.time - self.lost_at.pop(number))
            lines.append(f"worker {number} is back after {since}{with_state}")
        lines += [f"worker {number} has joined at step {event.step}{with_state}" for number in new]
        left = sorted(before - members - set(self.lost_at))
        lines += [f"worker {number} has left at step {event.step}" for number in left]
        self._members, self._untold = members, None
        return lines
