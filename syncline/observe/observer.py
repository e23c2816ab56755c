"""`Observer`, which receives a run's events as they happen, and the choice of a view for an output stream.

Here also `JsonLines`, the view for programs. Not here: the views for people (`terminal/`), which are imported when
chosen, so that a run whose output goes to a file does not load rich.
"""

from __future__ import annotations

import codecs
import sys
from typing import Protocol, TextIO

from syncline.observe.stream import unbreakable
from syncline.telemetry.events import Event, FatalFailure, RunEnded, to_line


class Observer(Protocol):
    """Receives every event, in order and from one thread. It must never make the run fail."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None:
        """No more events follow. May be called twice."""


class WithoutEnd:
    """Passes events to a view, except the failure or stop that ended the run: the caller raises that."""

    def __init__(self, view: Observer) -> None:
        self._view = view

    def on_event(self, event: Event) -> None:
        if not isinstance(event, RunEnded | FatalFailure):
            self._view.on_event(event)

    def close(self) -> None:
        self._view.close()


class JsonLines:
    """Writes the lines of `events.jsonl`, for programs, flushed one by one; the last is the summary or the failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = unbreakable(stream)

    def on_event(self, event: Event) -> None:
        self._stream.write(to_line(event).decode() + "\n")
        self._stream.flush()

    def close(self) -> None: ...


def choose_view(*, quiet: bool, json: bool, stream: TextIO | None = None) -> Observer:
    """The view for `stream` (default: stdout); `json` takes precedence over `quiet`.

    A capable terminal gets the live view, anything else plain lines. With `quiet`, warnings and failures go to stderr
    and one line with the result to `stream`.
    """
    out = stream if stream is not None else sys.stdout or unbreakable(None)
    if json:
        return JsonLines(out)
    if quiet:
        from syncline.observe.terminal.quiet import Quiet

        return Quiet(out, sys.stderr)
    if out.isatty() and _is_utf8(out):
        from syncline.observe.terminal.live_view import LiveView, terminal

        console = terminal(out)
        if not console.is_dumb_terminal:
            return LiveView(console)
    from syncline.observe.terminal.plain import PlainLines

    return PlainLines(out, sys.stderr)


def _is_utf8(stream: TextIO) -> bool:
    try:
        return codecs.lookup(stream.encoding or "ascii").name == "utf-8"
    except LookupError:
        return False
