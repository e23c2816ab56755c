"""`LiveView`: a run on a terminal, redrawn a few times a second.

Here: when to draw, and what is printed above the picture. Not here: the picture (`screen.py`), the last one
(`result.py`), and what it is drawn from (`state.py`).
"""

from __future__ import annotations

import threading
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from syncline.telemetry.events import (
    Event,
    Noted,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    Warned,
    WentOn,
    WorkerFailure,
    WorkerLost,
    WorkerOutput,
    WorkerSlow,
)
from syncline.view.result import failure_panel, result_panel
from syncline.view.screen import draw
from syncline.view.state import MOST_WARNINGS, RunState
from syncline.view.stream import unbreakable
from syncline.view.words import clean, headline

__all__ = ["LiveView", "terminal"]

_DRAWINGS_PER_S = 5
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def terminal(stream: TextIO) -> Console:
    """A console on `stream` that shows text as it is and never raises for want of a reader."""
    return Console(file=unbreakable(stream), markup=False, highlight=False, emoji=False)


class LiveView:
    """Draws from the first event to the last; what people should not miss is printed above and stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = RunState()
        # Held to read or to write the state and the lines above, never while printing: rich holds a lock of its own
        # then, and the two threads could wait for each other.
        self._lock = threading.Lock()
        self._above: list[Text] = []
        self._failure: WorkerFailure | None = None
        self._live: Live | None = None
        self._drawer: threading.Thread | None = None
        self._closing = threading.Event()

    def on_event(self, event: Event) -> None:
        """Take it in; the next drawing shows it."""
        with self._lock:
            self._state.apply(event)
            self._tell_above(event)
        if isinstance(event, Summary | RunEnded):
            self._finish(event)
        elif self._closing.is_set():
            self._print_above()
        elif self._live is None:
            self._start_drawing()

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._closing.set()
        if self._drawer is not None:
            self._drawer.join()
        with self._lock:
            self._tell_failure()
        self._print_above()
        if self._live is not None:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The picture now, for the terminal's size now."""
        spin = _SPINNER[int(time.monotonic() * 8) % len(_SPINNER)]
        with self._lock:
            # One column is left free: some terminals break the line after writing into the last one.
            picture = draw(self._state, width=options.max_width - 1, height=console.size.height - 1, spin=spin)
        yield picture

    def _start_drawing(self) -> None:
        self._live = Live(self, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start(refresh=True)
        # One thread does all the drawing, a few times a second: however many events there are and however much the
        # workers print, drawing costs the same.
        self._drawer = threading.Thread(
            target=self._keep_drawing, args=(self._live,), name="syncline-view", daemon=True
        )  # fmt: skip
        self._drawer.start()

    def _keep_drawing(self, live: Live) -> None:
        while not self._closing.wait(1 / _DRAWINGS_PER_S):
            if not self._print_above():
                live.refresh()

    def _print_above(self) -> bool:
        """Print the lines that are waiting, which also draws the picture anew; False if there are none."""
        with self._lock:
            lines, self._above = self._above, []
        if lines:
            self._console.print(Group(*lines))
        return bool(lines)

    def _finish(self, event: Summary | RunEnded) -> None:
        self.close()
        width = self._console.width
        if isinstance(event, Summary):
            self._console.print(result_panel(self._state, event, width))
        else:
            self._console.print(failure_panel(self._state, event, width))

    def _tell_above(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self._failure = None  # the end of the run tells it whole
        self._tell_failure()
        match event:
            case RunStarted():
                for note in self._state.plan.notes:
                    self._tell(Text(note, "dim"))
            case WorkerOutput():
                text = Text.from_ansi(clean(event.text, keep_colours=True))
                self._tell(Text.assemble((f"[worker {event.rank}] ", "dim"), text) if event.rank else text)
            case StrategySwitched():
                self._tell(Text(f"from step {event.step} on: {event.strategy}", "dim"))
            case Noted():
                self._tell(Text(_whole(event.message), "dim"))
            case Warned() if self._state.warning_count <= MOST_WARNINGS:
                who = f"worker {event.rank}: " if event.rank is not None else ""
                self._tell(Text.assemble(("! ", "bold yellow"), (f"{who}{_whole(event.message)}", "yellow")))
            case Warned() if self._state.warning_count == MOST_WARNINGS + 1:
                self._tell(Text(f"! Further warnings are only in {self._state.run_dir}/events.jsonl", "yellow"))
            case WorkerLost() | WentOn() | WorkerSlow():
                for line in self._state.news:
                    self._tell(Text.assemble(("! ", "bold yellow"), (_whole(line), "yellow")))
            case WorkerFailure():
                self._failure = event

    def _tell_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._tell(Text(f"✗ {self._state.plan.name_of(failure.rank)} is lost: {headline(failure.message)}", "red"))

    def _tell(self, text: Text) -> None:
        text.overflow = "fold"
        self._above.append(text)


def _whole(message: str) -> str:
    return "\n".join(clean(line) for line in message.strip().splitlines())
