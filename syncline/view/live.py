"""`LiveView`: a run on a terminal, redrawn a few times a second.

Here: when to draw, and what is printed above the picture. Not here: the picture (`screen.py`), the last one
(`result.py`), and what it is drawn from (`state.py`).
"""

from __future__ import annotations

import threading
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from syncline.telemetry.events import Event, RunEnded, RunStarted, Summary, Warned, WorkerFailure, WorkerOutput
from syncline.view.result import failure_panel, result_panel
from syncline.view.screen import draw
from syncline.view.state import RunState
from syncline.view.stream import unbreakable
from syncline.view.words import clean, headline

__all__ = ["LiveView", "terminal"]

_DRAWINGS_PER_S = 5
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_MOST_WARNINGS = 20


def terminal(stream: TextIO) -> Console:
    """A console on `stream` that shows text as it is and never raises for want of a reader."""
    return Console(file=unbreakable(stream), markup=False, highlight=False, emoji=False)


class LiveView:
    """Draws from the first event to the last; what people should not miss is printed above and stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = RunState()
        # Rich draws on a thread of its own and holds its own lock then. Ours is held only to read or to write the
        # state, never while printing: otherwise the two threads could wait for each other.
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._is_over = False
        self._failure: WorkerFailure | None = None

    def on_event(self, event: Event) -> None:
        """Take it in; the next drawing shows it."""
        with self._lock:
            self._state.apply(event)
        if isinstance(event, Summary | RunEnded):
            self._finish(event)
            return
        if self._live is None and not self._is_over:
            self._live = Live(
                self,
                console=self._console,
                refresh_per_second=_DRAWINGS_PER_S,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()
        self._print_above(event)

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._is_over = True
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The picture now, for the terminal's size now."""
        spin = _SPINNER[int(time.monotonic() * 8) % len(_SPINNER)]
        with self._lock:
            # One column is left free: some terminals break the line after writing into the last one.
            picture = draw(self._state, width=options.max_width - 1, height=console.size.height - 1, spin=spin)
        yield picture

    def _finish(self, event: Summary | RunEnded) -> None:
        self.close()
        panel = failure_panel if isinstance(event, RunEnded) else result_panel
        self._console.print(panel(self._state, event, self._console.width))  # type: ignore[arg-type]  # each its own

    def _print_above(self, event: Event) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:  # and the run goes on; otherwise its end tells it whole
            self._print(Text(f"✗ worker {failure.rank} is lost: {headline(failure.message)}", "red"))
        match event:
            case RunStarted():
                for note in self._state.plan.notes:
                    self._print(Text(note, "dim"))
            case WorkerOutput():
                text = Text.from_ansi(event.text.rstrip("\r\n").rpartition("\r")[2])
                self._print(Text.assemble((f"[worker {event.rank}] ", "dim"), text) if event.rank else text)
            case Warned() if self._state.warning_count <= _MOST_WARNINGS:
                who = f"worker {event.rank}: " if event.rank is not None else ""
                self._print(Text.assemble(("! ", "bold yellow"), (f"{who}{_whole(event.message)}", "yellow")))
            case Warned() if self._state.warning_count == _MOST_WARNINGS + 1:
                self._print(Text(f"! Further warnings are only in {self._state.run_dir}/events.jsonl", "yellow"))
            case WorkerFailure():
                self._failure = event

    def _print(self, text: Text) -> None:
        text.overflow = "fold"
        self._console.print(text)


def _whole(message: str) -> str:
    return "\n".join(clean(line) for line in message.strip().splitlines())
