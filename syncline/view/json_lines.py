"""`JsonLines`: each event as one line of JSON, for programs that follow a run."""

from __future__ import annotations

from typing import TextIO

from syncline.telemetry.events import Event, to_line
from syncline.view.stream import unbreakable

__all__ = ["JsonLines"]


class JsonLines:
    """The lines are those of `events.jsonl`, each flushed; the last one is the summary, or why there is none."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = unbreakable(stream)

    def on_event(self, event: Event) -> None:
        """One line."""
        self._stream.write(to_line(event).decode() + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is held back, so there is nothing to do."""
