"""What commands print besides their result: errors, download progress, and the events of a run.

Here: each is reported once, and the exit code follows. Not here: the views of a run (`observe/terminal/`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from syncline.errors import Interrupted, SynclineError
from syncline.observe.observer import Observer
from syncline.telemetry.events import Event, RunEnded


def print_error(message: str, label: str = "Error: ") -> None:
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and label else ("", "")
    typer.echo(f"{red}{label}{plain}{message}", err=True)


@contextmanager
def observing(*, quiet: bool, json: bool) -> Iterator[Observer]:
    """A view of the run. If the run fails or stops, report that once and set the exit code."""
    from syncline.observe.observer import choose_view

    view = _EndWatcher(choose_view(quiet=quiet, json=json))
    try:
        yield view
    except (SynclineError, Interrupted) as end:
        was_stopped = isinstance(end, Interrupted)
        if json or not view.has_shown_end:
            print_error(str(end), label="" if was_stopped else "Error: ")
        raise typer.Exit(130 if was_stopped else 1) from end
    except KeyboardInterrupt as end:
        print_error("Stopped before training began.", label="")
        raise typer.Exit(130) from end


@contextmanager
def exit_130_if_interrupted() -> Iterator[None]:
    """For commands that keep their partial result on Ctrl-C: the message, and the exit code of an interrupt."""
    try:
        yield
    except Interrupted as stopped:
        print_error(str(stopped), label="")
        raise typer.Exit(130) from stopped


class DownloadProgress:
    """A `Progress` callback: on a terminal a line that is redrawn, elsewhere one line per file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._announced: set[str] = set()

    def __call__(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        if self._is_terminal:
            total = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
            end = "\n" if total_bytes and done_bytes >= total_bytes else ""
            self._stream.write(f"\r\033[K{label}: {done_bytes / 1e6:.1f}{total} MB{end}")
            self._stream.flush()
        elif label not in self._announced:
            self._announced.add(label)
            self._stream.write(f"{label}\n")
            self._stream.flush()


class _EndWatcher:
    """Passes events on and remembers whether the view has shown the end of the run."""

    def __init__(self, view: Observer) -> None:
        self._view = view
        self.has_shown_end = False

    def on_event(self, event: Event) -> None:
        self._view.on_event(event)
        self.has_shown_end = self.has_shown_end or isinstance(event, RunEnded)

    def close(self) -> None:
        self._view.close()
