"""`syncline bench`: runs the suites, reports progress, and writes the report.

Here: the sequence of suites, and the files. Not here: measuring (`harness.py`), the suites (`suites.py`), the forms of
a report (`report.py`, `html.py`).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from syncline.errors import ConfigError, Interrupted, SynclineError
from syncline.lab.bench.harness import BenchSettings, Measured, measure
from syncline.lab.bench.html import as_html
from syncline.lab.bench.processes import signal_handler
from syncline.lab.bench.report import Report, as_dict, as_markdown, show
from syncline.lab.bench.suites import choose, prepare
from syncline.lab.machine import BenchMachine
from syncline.lab.output import Reporter, make_reporter
from syncline.observe.terminal.live_view import terminal
from syncline.telemetry.run_dir import RunDir

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
    """Measure the suites called `names` (default: all except those measured by name only), show and write the report.

    Raises `Interrupted` after Ctrl-C and `SynclineError` if something failed; in both cases after showing and writing
    the rest. A missed goal is a finding, not an error.
    """
    chosen = choose(names)
    if repeats is None:
        repeats = _QUICK_REPEATS if quick else _REPEATS
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}, but must be 1 or more.", setting="repeats")
    folder = _folder(out)
    report = Report(BenchMachine.here(), is_quick=quick)
    reporter = make_reporter(as_json=as_json)
    progress = _Progress(reporter)
    settings = BenchSettings(quick=quick, say=progress.say, peers_dir=peers_dir)
    with signal_handler(signal.SIGTERM, signal.default_int_handler):  # clean up after SIGTERM as after Ctrl-C
        for name in chosen:
            _measure_all(name, repeats, settings, report, progress)
            write(report, folder)
            if report.is_interrupted:
                break
    reporter.report("summary", "", folder=str(folder), **as_dict(report))
    if not as_json:
        show(report, terminal(sys.stdout))
        reporter.report("written", f"Results are in {folder}: bench.html, bench.md and bench.json.")
    if report.is_interrupted:
        raise Interrupted(f"Stopped. The results so far are in {folder}.")
    if report.failures:
        raise SynclineError(
            f"{len(report.failures)} measurements failed; the errors are in the report in {folder}.",
            failures=report.failures,
        )
    return report


def _measure_all(name: str, repeats: int, settings: BenchSettings, report: Report, progress: _Progress) -> None:
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
    except Exception as error:  # a suite that cannot be prepared must not end the others
        report.problems.append(f"{name} could not be measured. {type(error).__name__}: {error}")


def _folder(out: Path | None) -> Path:
    """The folder of the report; created before measuring, so that an error costs no time."""
    if out is None:
        return RunDir.new(Path("runs"), f"bench-{time.strftime('%Y%m%d-%H%M%S')}", exact=False).path
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Cannot create the folder {out}: {error.strerror}. Choose another with --out.", setting="out"
        ) from error
    return out


def write(report: Report, folder: Path) -> None:
    """`bench.html` and `bench.md` for people, `bench.json` for programs."""
    (folder / "bench.html").write_text(as_html(report), encoding="utf-8")
    (folder / "bench.md").write_text(as_markdown(report), encoding="utf-8")
    (folder / "bench.json").write_text(json.dumps(as_dict(report), indent=1) + "\n", encoding="utf-8")


class _Progress:
    """Reports every measurement to programs, and a line per round to people."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._values: list[str] = []
        self._last_line_s = 0.0

    def say(self, text: str) -> None:
        self._reporter.report("message", text, text=text)

    def on_measured(self, measured: Measured) -> None:
        details = measured._asdict()
        suite = details.pop("suite")
        self._reporter.report("measured", self._line(measured), suite=suite.name, unit=suite.unit, **details)

    def _line(self, measured: Measured) -> str | None:
        """After the last contender of a round, its values; not more often than every few seconds."""
        suite = measured.suite
        if measured.value is not None:
            self._values.append(f"{measured.contender} {measured.value:.4g} {suite.unit}")
        else:
            self._values.append(f"{measured.contender} {'failed' if measured.failure else 'skipped'}")
        if measured.contender != suite.contenders[-1].name:
            return None
        values, self._values = self._values, []
        now = time.monotonic()
        is_notable = measured.round in (0, 1, measured.rounds)
        if not is_notable and now - self._last_line_s < _LINE_EVERY_S:
            return None
        self._last_line_s = now
        where = f"round {measured.round} of {measured.rounds}" if measured.round else "warm-up"
        return f"{suite.name}, {where}: {', '.join(values)}"
