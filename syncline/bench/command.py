"""`syncline bench`: which suites, in which order, what the user sees meanwhile, and what remains.

Here: the course of a bench. Not here: measuring (`harness.py`), the suites (`suites.py`), the forms of a report
(`report.py`, `html.py`), writing them (`files.py`).
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer

from syncline.bench.files import write
from syncline.bench.harness import Measured, Settings, measure
from syncline.bench.machine import BenchMachine
from syncline.bench.report import Report, as_dict, show
from syncline.bench.suites import choose, prepare
from syncline.errors import ConfigError, Interrupted, SynclineError
from syncline.telemetry.run_dir import RunDir
from syncline.view.live import terminal

__all__ = ["bench"]

_REPEATS, _QUICK_REPEATS = 5, 2
_LINE_EVERY_S = 2.0


def bench(
    names: Iterable[str],
    *,
    repeats: int | None = None,
    quick: bool = False,
    out: Path | None = None,
    as_json: bool = False,
    peers_dir: Path | None = None,
) -> Report:
    """Measure the suites called `names` (none: all that need not be named), show and write the report.

    `Interrupted` after Ctrl-C, `SynclineError` if something could not be measured; in both cases the rest is shown and
    written first. A goal that is not met is a finding and not an error.
    """
    chosen = choose(names)
    if repeats is None:
        repeats = _QUICK_REPEATS if quick else _REPEATS
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}, but must be 1 or more.")
    folder = _folder(out)
    report = Report(BenchMachine.here(), is_quick=quick)
    progress: _Progress = _JsonProgress() if as_json else _PlainProgress()
    settings = Settings(quick=quick, say=progress.say, peers_dir=peers_dir)
    with _polite_kill_is_ctrl_c():
        for name in chosen:
            _measure_all(name, repeats, settings, report, progress)
            write(report, folder)
            if report.is_interrupted:
                break
    progress.finish(report, folder)
    if report.is_interrupted:
        raise Interrupted(f"Stopped. What was measured by then is in {folder}.")
    if report.failures:
        raise SynclineError(f"Not everything could be measured; the report in {folder} says what and why.")
    return report


def _measure_all(name: str, repeats: int, settings: Settings, report: Report, progress: _Progress) -> None:
    try:
        with closing(prepare(name, settings)) as suites:
            for suite in suites:
                result = measure(suite, repeats, progress.on_measured)
                result.entry = name
                report.results.append(result)
                if result.is_interrupted:
                    report.is_interrupted = True
                    return
    except KeyboardInterrupt:
        report.is_interrupted = True
    except Exception as error:  # one suite that cannot be prepared must not cost the others
        report.problems.append(f"{name} could not be measured. {type(error).__name__}: {error}")


def _folder(out: Path | None) -> Path:
    """Where the report goes; made first, so that a place that cannot be written to costs no measuring."""
    if out is None:
        return RunDir.new(Path("runs"), f"bench-{time.strftime('%Y%m%d-%H%M%S')}", exact=False).path
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {out} cannot be made: {error.strerror}. Choose another with --out.") from error
    return out


class _Progress(Protocol):
    def say(self, text: str) -> None: ...

    def on_measured(self, measured: Measured) -> None: ...

    def finish(self, report: Report, folder: Path) -> None: ...


class _PlainProgress:
    """A line for a round, on stderr; the report itself goes to stdout."""

    def __init__(self) -> None:
        self._values: list[str] = []
        self._last_line_s = 0.0

    def say(self, text: str) -> None:
        typer.echo(text, err=True)

    def on_measured(self, measured: Measured) -> None:
        suite = measured.suite
        if measured.value is not None:
            self._values.append(f"{measured.contender} {measured.value:.4g} {suite.unit}")
        else:
            self._values.append(f"{measured.contender} {'failed' if measured.failure else 'left out'}")
        if measured.contender != suite.contenders[-1].name:
            return
        values, self._values = self._values, []
        now = time.monotonic()
        is_notable = measured.round in (0, 1, measured.rounds)
        if is_notable or now - self._last_line_s >= _LINE_EVERY_S:
            where = f"round {measured.round} of {measured.rounds}" if measured.round else "warm-up"
            self.say(f"{suite.name}, {where}: {', '.join(values)}")
            self._last_line_s = now

    def finish(self, report: Report, folder: Path) -> None:
        typer.echo("", err=True)
        show(report, terminal(sys.stdout))
        typer.echo(f"Written to {folder}: bench.html to look at, bench.md and bench.json.", err=True)


class _JsonProgress:
    """One JSON object a line on stdout; the last one is the report."""

    def say(self, text: str) -> None:
        self._line({"event": "said", "text": text})

    def on_measured(self, measured: Measured) -> None:
        details = measured._asdict()
        suite = details.pop("suite")
        self._line({"event": "measured", "suite": suite.name, "unit": suite.unit, **details})

    def finish(self, report: Report, folder: Path) -> None:
        self._line({"event": "summary", "folder": str(folder), **as_dict(report)})

    def _line(self, data: dict[str, Any]) -> None:
        typer.echo(json.dumps(data))


@contextmanager
def _polite_kill_is_ctrl_c() -> Iterator[None]:
    """Also a bench that is ended by SIGTERM ends what it started."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can take signals
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
