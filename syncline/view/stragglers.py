"""Slow workers in words: who holds the others up, how much, and for how long it did.

Here: `Stragglers`, which follows a run's events, for every view and for the report. Not here: who counts as slow
(`coordinator/pace.py`).
"""

from __future__ import annotations

from syncline.telemetry.events import WorkerSlow
from syncline.view.words import duration

__all__ = ["Stragglers"]

_PARTS = {
    "data": "reading its data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "update": "the update",
    "compute": "its computing",
}


class Stragglers:
    """Who is slow at the moment, and who was."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._worst: dict[int, float] = {}

    def on_slow(self, event: WorkerSlow) -> str:
        """In words: who, how much, and in what."""
        if not event.is_slow:
            self.on_gone(event.rank, event.time)
            return f"worker {event.rank} keeps up with the others again"
        self._since[event.rank] = event.time
        times = event.work_s / event.others_s if event.others_s else float("inf")
        self._worst[event.rank] = max(self._worst.get(event.rank, 0.0), times)
        part = _PARTS.get(event.mostly, event.mostly)
        return (
            f"worker {event.rank} is slow: it works {duration(event.work_s)} on a step, the others "
            f"{duration(event.others_s)}; most of the difference is in {part}"
        )

    def on_gone(self, rank: int, time: float) -> None:
        """It is not slow any more, or not there."""
        if rank in self._since:
            self._seconds[rank] = self._seconds.get(rank, 0.0) + time - self._since.pop(rank)

    def account(self, now: float) -> list[str]:
        """In words, at the end: who was slow for how long."""
        for rank in list(self._since):
            self.on_gone(rank, now)
        return [
            f"worker {rank} was slow for {duration(seconds)}: {self._worst[rank]:.1f} times the others' work on a step"
            for rank, seconds in sorted(self._seconds.items())
        ]
