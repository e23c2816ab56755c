"""`LiveView`: a run on a terminal, redrawn a few times a second.

Here: when to draw, and the lines printed above the screen. Not here: the screen (`screen.py`), the final panel
(`result.py`), or the state they show (`state.py`).
"""

from __future__ import annotations

import threading
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from syncline.observe.division_text import division_text
from syncline.observe.formatting import clean, headline
from syncline.observe.state import MOST_WARNINGS, RunState
from syncline.observe.stream import unbreakable
from syncline.observe.terminal.result import failure_panel, result_panel
from syncline.observe.terminal.screen import draw
from syncline.telemetry.events import (
    Event,
    FatalFailure,
    GraphDivided,
    GroupTrains,
    InfoMessage,
    Recovered,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    WarningMessage,
    WorkerFailure,
    WorkerOutput,
    WorkerSlow,
)

_DRAWINGS_PER_S = 5
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def terminal(stream: TextIO) -> Console:
    """A console on `stream` without markup, which survives a closed pipe."""
    return Console(file=unbreakable(stream), markup=False, highlight=False, emoji=False)


class LiveView:
    """Redraws the screen from the first event to the last; warnings and failures are printed above it and stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = RunState()
        # Guards the state and the lines above. Never held while printing: rich takes a lock of its own then, and the
        # two threads could deadlock.
        self._lock = threading.Lock()
        self._above: list[Text] = []
        self._failure: FatalFailure | None = None
        self._live: Live | None = None
        self._drawer: threading.Thread | None = None
        self._closing = threading.Event()

    def on_event(self, event: Event) -> None:
        with self._lock:
            self._state.apply(event)
            self._add_lines_for(event)
        if isinstance(event, Summary | RunEnded):
            self._finish(event)
        elif self._closing.is_set():
            self._print_above()
        elif self._live is None:
            self._start_drawing()

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        self._closing.set()
        if self._drawer is not None:
            self._drawer.join()
        with self._lock:
            self._report_failure()
        self._print_above()
        if self._live is not None:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The current screen for the current terminal size."""
        spin = _SPINNER[int(time.monotonic() * 8) % len(_SPINNER)]
        with self._lock:
            # Leave one column free: some terminals wrap after the last one.
            screen = draw(self._state, width=options.max_width - 1, height=console.size.height - 1, spin=spin)
        yield screen

    def _start_drawing(self) -> None:
        self._live = Live(self, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start(refresh=True)
        # One thread draws at a fixed rate: the cost does not grow with the number of events or printed lines.
        self._drawer = threading.Thread(
            target=self._keep_drawing, args=(self._live,), name="syncline-view", daemon=True
        )  # fmt: skip
        self._drawer.start()

    def _keep_drawing(self, live: Live) -> None:
        while not self._closing.wait(1 / _DRAWINGS_PER_S):
            if not self._print_above():
                live.refresh()

    def _print_above(self) -> bool:
        """Print pending lines, which also redraws the screen; False if there are none."""
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

    def _add_lines_for(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self._failure = None  # the RunEnded message contains it
        self._report_failure()
        match event:
            case RunStarted():
                for note in self._state.plan.notes:
                    self._add_line(Text(note, "dim"))
            case WorkerOutput():
                text = Text.from_ansi(clean(event.text, keep_colors=True))
                self._add_line(
                    Text.assemble((f"[worker {event.worker_id}] ", "dim"), text) if event.worker_id else text
                )
            case StrategySwitched():
                self._add_line(Text(f"strategy from step {event.step}: {event.strategy}", "dim"))
            case InfoMessage():
                self._add_line(Text(_cleaned(event.message), "dim"))
            case GraphDivided():
                self._add_line(Text(division_text(event), "dim"))
            case WarningMessage() if self._state.warning_count <= MOST_WARNINGS:
                who = f"worker {event.worker_id}: " if event.worker_id is not None else ""
                self._add_line(Text.assemble(("! ", "bold yellow"), (f"{who}{_cleaned(event.message)}", "yellow")))
            case WarningMessage() if self._state.warning_count == MOST_WARNINGS + 1:
                self._add_line(Text(f"! further warnings: {self._state.run_dir}/events.jsonl", "yellow"))
            case WorkerFailure() | Recovered() | WorkerSlow() | GroupTrains():
                for line in self._state.notices:
                    self._add_line(Text.assemble(("! ", "bold yellow"), (_cleaned(line), "yellow")))
            case FatalFailure():
                self._failure = event

    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._add_line(
                Text(f"✗ {self._state.plan.name_of(failure.worker_id)} failed: {headline(failure.message)}", "red")
            )

    def _add_line(self, text: Text) -> None:
        text.overflow = "fold"
        self._above.append(text)


def _cleaned(message: str) -> str:
    return "\n".join(clean(line) for line in message.strip().splitlines())
