"""What commands print besides their result: errors, download progress, and the events of a run.

Here: each is reported once, and the exit code follows. Not here: the views of a run (`observe/terminal/`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from syncline.errors import SCRIPT_EXIT, Interrupted, SynclineError
from syncline.observe.observer import Observer
from syncline.telemetry.events import Event, RunEnded, WorkerOutput


def print_error(message: str, label: str = "Error: ") -> None:
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and label else ("", "")
    with contextlib.suppress(OSError):  # the stream is closed; the exit code still reports it
        shown = message.encode(errors="backslashreplace").decode()  # it may quote a path that is not UTF-8
    typer.echo(f"{red}{label}{plain}{shown}", err=True)


@contextmanager
def observing(*, quiet: bool, json: bool) -> Iterator[Observer]:
    """A view of the run. If the run fails or stops, report that once and set the exit code."""
    from syncline.observe.observer import choose_view

    view = _EndWatcher(choose_view(quiet=quiet, json=json), is_for_people=not json, shows_output=not (json or quiet))
    try:
        yield view
    except (SynclineError, Interrupted) as end:
        if end.code == SCRIPT_EXIT:
            if not view.has_shown_output:
                print_error(str(end), label="")
            raise typer.Exit(end.facts["exit_code"]) from end
        was_stopped = isinstance(end, Interrupted)
        if json or not view.has_shown_end:
            print_error(str(end), label="" if was_stopped else "Error: ")
        raise typer.Exit(exit_code_of(end)) from end
    except KeyboardInterrupt as end:
        print_error("Stopped before training began.", label="")
        raise typer.Exit(exit_code_of(end)) from end


@contextmanager
def exit_if_interrupted() -> Iterator[None]:
    """For commands that keep their partial result on Ctrl-C: the message, and the exit code of an interrupt."""
    try:
        yield
    except Interrupted as stopped:
        print_error(str(stopped), label="")
        raise typer.Exit(exit_code_of(stopped)) from stopped


def exit_code_of(end: BaseException) -> int:
    """1 for an error; for a stop 128 and the signal's number, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
    if isinstance(end, KeyboardInterrupt):
        facts = end.facts if isinstance(end, Interrupted) else {}
        return 128 + signal.Signals[facts.get("signal") or "SIGINT"]
    return 1


def open_standard_streams() -> None:
    """Open those that the caller has closed, as `>&-` does: otherwise the next file opened would take their place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.dup2(opened, number)  # workers inherit it
            if opened != number:
                os.close(opened)
            else:
                os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def flush_output() -> bool:
    """Write what is left of the output. False if it is lost, unless its reader has closed the pipe, as `head` does."""
    is_complete = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            is_complete = is_complete and isinstance(error, BrokenPipeError)
            with contextlib.suppress(OSError, ValueError):  # else Python would try again at exit, and exit with 120
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    return is_complete


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
    """Passes events on and remembers whether the view has shown the end of the run, and what its code printed.

    A script that refused its arguments has printed why; people need no more than that.
    """

    def __init__(self, view: Observer, *, is_for_people: bool, shows_output: bool) -> None:
        self._view, self._is_for_people, self._shows_output = view, is_for_people, shows_output
        self.has_shown_end = self.has_shown_output = False

    def on_event(self, event: Event) -> None:
        if isinstance(event, WorkerOutput):
            self.has_shown_output = self._shows_output
        if isinstance(event, RunEnded):
            if event.reason == SCRIPT_EXIT and self._is_for_people:
                return
            self.has_shown_end = True
        self._view.on_event(event)

    def close(self) -> None:
        self._view.close()
