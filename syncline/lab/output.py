"""Output of commands that run several trainings in a row: progress, tables, and the file with the results.

Here: `Reporter` with its text and JSON forms, `check_output_file`, `write_results`, `table_lines`. Not here: what the
lines say (`chaos/report.py`, `bench/compare_strategies.py`).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from syncline.errors import ConfigError, SynclineError
from syncline.observe.formatting import clean, duration, rate
from syncline.observe.state import RunState
from syncline.observe.stream import unbreakable
from syncline.telemetry.events import Event, RunStarted, WarningMessage
from syncline.telemetry.run_dir import RunDir

_DRAW_EVERY_S = 0.2


class Reporter(Protocol):
    """Reports progress as text for people or as JSON for programs. One thread calls it, in order."""

    def report(self, event: str, text: str | None, /, **facts: Any) -> None:
        """Report one event: `text` goes to people (None: nothing), `event` and `facts` go to programs."""

    def start_run(self, name: str, note: str, event: str, /, **facts: Any) -> None:
        """A run starts; warnings and the status line carry its `name` from now on."""

    def on_run_event(self, state: RunState, event: Event) -> None:
        """Report warnings of the current run, and on a terminal how far it is."""

    def finish(self, lines: Iterable[str], file: Path, /, **facts: Any) -> None:
        """Report the results, which are also in `file` and in a JSON file beside it."""


def make_reporter(*, as_json: bool) -> Reporter:
    return JsonReporter(sys.stdout) if as_json else TextReporter(sys.stdout, sys.stderr)


class RunObserver:
    """Follows one run: keeps its state and folder, and passes its events on."""

    def __init__(self, on_run_event: Callable[[RunState, Event], None], *callbacks: Callable[[Event], None]) -> None:
        self.state = RunState()
        self.run_dir: RunDir | None = None
        self._on_run_event, self._callbacks = on_run_event, callbacks

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.run_dir = RunDir(Path(event.run_dir))
        self.state.apply(event)
        for callback in self._callbacks:
            callback(event)
        self._on_run_event(self.state, event)

    def close(self) -> None: ...


class TextReporter:
    """Progress lines and, on a terminal, a status line go to stderr; the results go to stdout."""

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self._out, self._errors = unbreakable(out), unbreakable(errors)
        self._is_terminal = errors.isatty()
        self._run = ""
        self._drawn_at = 0.0

    def report(self, event: str, text: str | None, /, **facts: Any) -> None:
        del event, facts
        if text is not None:
            self._errors.write(f"{self._line_start}{text}\n")
            self._errors.flush()

    def start_run(self, name: str, note: str, event: str, /, **facts: Any) -> None:
        self._run, self._drawn_at = name, 0.0
        if not self._is_terminal:  # there, the status line shows it
            self.report(event, f"{name}: {note}", **facts)

    def on_run_event(self, state: RunState, event: Event) -> None:
        if isinstance(event, WarningMessage):
            self.report("warning", f"{self._run}: warning: {clean(event.message)}")
        now = time.monotonic()
        if self._is_terminal and now - self._drawn_at >= _DRAW_EVERY_S:
            self._drawn_at = now
            text = f"{self._run}: {_status(state)}"[: shutil.get_terminal_size().columns - 1]
            self._errors.write(f"{self._line_start}{text}")
            self._errors.flush()

    def finish(self, lines: Iterable[str], file: Path, /, **facts: Any) -> None:
        del facts
        self.report("", "")
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()
        self.report("", f"Results are in {file} and {file.with_suffix('.json')}.")

    @property
    def _line_start(self) -> str:
        return "\r\033[K" if self._is_terminal else ""


class JsonReporter:
    """One JSON object per line on stdout; the last one has the results."""

    def __init__(self, out: TextIO) -> None:
        self._out = unbreakable(out)
        self._run = ""

    def report(self, event: str, text: str | None, /, **facts: Any) -> None:
        del text
        self._out.write(json.dumps({"event": event, **facts}) + "\n")
        self._out.flush()

    def start_run(self, name: str, note: str, event: str, /, **facts: Any) -> None:
        self._run = name
        self.report(event, note, **facts)

    def on_run_event(self, state: RunState, event: Event) -> None:
        del state
        if isinstance(event, WarningMessage):
            self.report("warning", None, run=self._run, message=event.message)

    def finish(self, lines: Iterable[str], file: Path, /, **facts: Any) -> None:
        del lines
        self.report("summary", None, file=str(file), **facts)


def check_output_file(out: Path | None, *, default_name: str) -> None:
    """Refuse an --out that cannot be written before an hour of training, not after it."""
    if out is None:
        return
    suffix = Path(default_name).suffix
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder. Give a file, such as {out / default_name}.", setting="out")
    if out.suffix == ".json":
        raise ConfigError(
            f"--out {out} names the text file; JSON is written beside it. Try {out.with_suffix(suffix)}.", setting="out"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError(
            f"Cannot write {out}: {error.strerror}. Choose another file with --out.", setting="out"
        ) from error


def write_results(file: Path, text: str, data: dict[str, Any]) -> None:
    """Write the text, and the JSON beside it."""
    RunDir.write(file, text.encode())
    RunDir.write(file.with_suffix(".json"), (json.dumps(data, indent=1) + "\n").encode())


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell; the first one to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(first), *(c.rjust(width) for c, width in zip(cells, others, strict=True))])


def error_text(error: Exception) -> str:
    """The message of an error, with its type unless it is one of Syncline's own."""
    text = str(error).strip() or "no message"
    return text if isinstance(error, SynclineError) else f"{type(error).__name__}: {text}"


def _status(state: RunState) -> str:
    parts = ["starting" if state.is_starting else f"epoch {state.epoch}/{state.plan.epochs}, step {state.step}"]
    if state.samples_per_s:
        parts.append(f"{rate(state.samples_per_s)} samples/s")
    if state.left_s is not None:
        parts.append(f"{duration(state.left_s)} left")
    return ", ".join(parts)
