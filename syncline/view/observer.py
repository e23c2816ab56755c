"""`Observer`: who is told of a run's events as they happen, and which of the views suits where the output goes.

Here: the interface and the choice. Not here: the views, one file each; they are imported when chosen, so that a run
whose output goes to a file never loads what draws on a terminal.
"""

from __future__ import annotations

import codecs
import sys
from typing import Protocol, TextIO

from syncline.telemetry.events import Event, RunEnded, WorkerFailure

__all__ = ["Observer", "UntilTheEnd", "choose_view"]


class Observer(Protocol):
    """Is told of every event, in order and by one thread, and must never be the reason that a run ends."""

    def on_event(self, event: Event) -> None:
        """Something happened."""

    def close(self) -> None:
        """Nothing more will happen. May be called twice."""


class UntilTheEnd:
    """Shows a run in another view, all but how it ended in failure or was stopped: that is somebody else's to tell."""

    def __init__(self, view: Observer) -> None:
        self._view = view

    def on_event(self, event: Event) -> None:
        """Pass it on, unless it is the end."""
        if not isinstance(event, RunEnded | WorkerFailure):
            self._view.on_event(event)

    def close(self) -> None:
        """Nothing more will happen."""
        self._view.close()


def choose_view(*, quiet: bool, json: bool, stream: TextIO | None = None) -> Observer:
    """The view for `stream` (default: stdout), with the explicit wishes first; `json` wins over `quiet`.

    A terminal that can show it gets the live view, anything else plain lines. `quiet` leaves warnings and failures,
    which go to stderr, and one line with the result, which goes to `stream`.
    """
    out = stream if stream is not None else sys.stdout
    if json:
        from syncline.view.json_lines import JsonLines

        return JsonLines(out)
    if quiet:
        from syncline.view.quiet import Quiet

        return Quiet(out, sys.stderr)
    if out.isatty() and _speaks_utf8(out):
        from syncline.view.live import LiveView, terminal

        console = terminal(out)
        if not console.is_dumb_terminal:
            return LiveView(console)
    from syncline.view.plain import PlainLines

    return PlainLines(out, sys.stderr)


def _speaks_utf8(stream: TextIO) -> bool:
    try:
        return codecs.lookup(stream.encoding or "ascii").name == "utf-8"
    except LookupError:
        return False
