"""`syncline strategies --compare`: trains the same model on the same data with every preset, and prints one table.

Here: the comparison, its rows, and the table as text, Markdown and JSON. Not here: side-by-side ratios with repeats
(`harness.py`). Each preset trains once, to the end and with its default settings, as a user would. Accuracy and bytes
are reproducible; the times are those of one run on this machine.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from syncline.config.run import RunConfig
from syncline.data.named import Progress as DownloadProgress
from syncline.driver import run_task
from syncline.errors import Interrupted, SynclineError, UnknownName
from syncline.lab.machine import BenchMachine
from syncline.lab.output import (
    RunObserver,
    check_output_file,
    error_text,
    make_reporter,
    table_lines,
    write_results,
)
from syncline.observe.formatting import accuracy, count, duration, headline, rate
from syncline.observe.strategy_stats import strategy_stats
from syncline.strategies.presets import PRESETS, Preset
from syncline.task import Task
from syncline.telemetry.run_dir import RunDir

GOAL_ACCURACY = 0.985
GOAL_EPOCHS = 5
_METRIC = "test/accuracy"
_FORMAT = 1
_MOST_WORKERS = {"hogwild": 2}
"""Worker limits of presets that declare none: lock-free updates of shared memory are compared with two workers."""
_PERCENT = f"{100 * GOAL_ACCURACY:g}%"
_COLUMNS = ("strategy", "workers", "accuracy", f"{_PERCENT} at", "B/sample", "samples/s", "time", "goal")
"""Short, so that the table fits 80 columns."""


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """The same for every preset."""

    model: str = "lenet"
    data: str = "mnist"
    workers: int = 4
    epochs: int = GOAL_EPOCHS
    seed: int = 0

    @property
    def description(self) -> str:
        """`lenet on mnist, 4 workers, 5 epochs, seed 0`."""
        how = f"{count(self.workers, 'worker')}, {count(self.epochs, 'epoch')}, seed {self.seed}"
        return f"{self.model} on {self.data}, {how}"


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The result of one preset. If the run failed, `failure` says why and the figures are None."""

    name: str
    strategy: str
    workers: int
    accuracy: float | None = None
    """Final test accuracy."""
    goal_epoch: int | None = None
    """The first epoch at whose end the accuracy reached the goal; None: never."""
    bytes_per_sample: float | None = None
    """Sent and received, over all workers; None if the run did not record it."""
    samples_per_s: float | None = None
    seconds: float | None = None
    run_dir: str | None = None
    failure: str | None = None

    @property
    def meets_goal(self) -> bool | None:
        """Whether the goal was reached in time; None if the run failed."""
        if self.failure is not None:
            return None
        return self.goal_epoch is not None and self.goal_epoch <= GOAL_EPOCHS


@dataclass
class Comparison:
    """The results of one comparison, complete or not."""

    settings: ComparisonSettings
    machine: BenchMachine
    names: tuple[str, ...]
    """The presets to measure."""
    command: str
    """The command that reproduces it."""
    started: float = field(default_factory=time.time)
    rows: list[ComparisonRow] = field(default_factory=list)
    is_interrupted: bool = False
    kept: list[ComparisonRow] = field(default_factory=list)
    """Rows of an earlier page in the same file, of presets that were not measured again."""

    @property
    def failures(self) -> dict[str, str]:
        """The presets that failed, with the full error."""
        return {row.name: row.failure for row in self.rows if row.failure is not None}

    @property
    def page_rows(self) -> list[ComparisonRow]:
        """Kept and measured rows, in the order of the presets."""
        order = [preset.name for preset in PRESETS.values()]
        return sorted([*self.kept, *self.rows], key=lambda row: order.index(row.name))


def presets_named(names: Iterable[str]) -> list[Preset]:
    """These presets, each once; all of them if `names` is empty."""
    found = []
    for name in dict.fromkeys(name.strip().replace("-", "_") for name in names):
        if name not in PRESETS:
            raise UnknownName.among("strategy", name.replace("_", "-"), [p.name for p in PRESETS.values()])
        found.append(PRESETS[name])
    return found or list(PRESETS.values())


def compare(
    settings: ComparisonSettings,
    *,
    only: Sequence[str] = (),
    out: Path | None = None,
    as_json: bool = False,
    download_progress: DownloadProgress | None = None,
) -> Comparison:
    """Train every preset (or those in `only`), one after the other; show the table and write it to `out`.

    The file is rewritten after each preset, with JSON beside it. With `only`, rows of other presets stay if they were
    measured with the same settings. Raises `Interrupted` after Ctrl-C and `SynclineError` if a preset failed, both
    after showing and writing the rest. A missed goal is a finding, not an error.
    """
    presets = presets_named(only)
    # Report the user's mistakes once, before any preset trains.
    RunConfig(workers=settings.workers, epochs=settings.epochs, seed=settings.seed)
    check_output_file(out, default_name="strategies.md")
    task = Task(model=settings.model, data=settings.data)
    task = task.with_defaults().located(None, download_progress)
    folder = RunDir.new(Path("runs"), f"compare-{time.strftime('%Y%m%d-%H%M%S')}", exact=False).path
    file = out if out is not None else folder / "strategies.md"
    names = tuple(preset.name for preset in presets)
    kept = _earlier_rows(out, settings, names) if only and out is not None else []
    command = _command(settings, () if kept else only, out)  # reproduces the whole page
    found = Comparison(settings, BenchMachine.here(), names, command, kept=kept)
    reporter = make_reporter(as_json=as_json)
    number_of = "1 strategy" if len(names) == 1 else f"{len(names)} strategies"
    reporter.report("started", f"{settings.description}: {number_of}", strategies=names, settings=asdict(settings))
    seconds: list[float] = []  # of presets that did not fail: how long a failure took says nothing about the others
    try:
        for number, preset in enumerate(presets, 1):
            run_name = f"{number:>{len(str(len(presets)))}}/{len(presets)} {preset.name}"
            reporter.start_run(run_name, "training", "training", name=preset.name, number=number, of=len(presets))
            began, remaining = time.monotonic(), len(presets) - number
            row = _measured(task, preset, settings, folder, RunObserver(reporter.on_run_event))
            found.rows.append(row)
            write(found, file)
            if row.failure is None:
                seconds.append(time.monotonic() - began)
            text = f"{run_name}: {_progress_line(row, remaining, seconds)}"
            reporter.report("measured", text, **_row_as_dict(row), left=remaining)
    except KeyboardInterrupt:
        found.is_interrupted = True
        if found.rows:  # do not replace an earlier table with an empty one
            write(found, file)
    reporter.finish(as_lines(found) if found.rows else (), file, **as_dict(found))
    if found.is_interrupted:
        where = f"The results so far are in {file}." if found.rows else "Nothing was measured yet."
        raise Interrupted(f"Stopped. {where}")
    if found.failures:
        raise SynclineError(
            f"{len(found.failures)} of {len(found.rows)} strategies failed: {', '.join(found.failures)}. "
            f"The errors are in {file}.",
            failed=list(found.failures),
        )
    return found


def write(comparison: Comparison, file: Path) -> None:
    """The Markdown, and the JSON beside it."""
    write_results(file, as_markdown(comparison), as_dict(comparison))


def as_dict(comparison: Comparison) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "started": comparison.started,
        "is_interrupted": comparison.is_interrupted,
        "command": comparison.command,
        "settings": asdict(comparison.settings),
        "goal": {"accuracy": GOAL_ACCURACY, "epochs": GOAL_EPOCHS},
        "machine": comparison.machine.to_dict(),
        "rows": [_row_as_dict(row) for row in comparison.page_rows],
    }


def as_lines(comparison: Comparison) -> Iterator[str]:
    """As plain text; the table fits 80 columns."""
    yield f"{comparison.settings.description}; the goal is {_goal()}."
    yield ""
    yield from table_lines([_COLUMNS, *(_cells(row) for row in comparison.rows)])
    yield ""
    yield from _caveats(comparison)
    yield from (f"{name} failed: {headline(why)}" for name, why in comparison.failures.items())
    yield from comparison.machine.describe()


def as_markdown(comparison: Comparison) -> str:
    started = time.strftime("Measured on %Y-%m-%d at %H:%M UTC.", time.gmtime(comparison.started))
    lines = [
        "# Strategies compared",
        "",
        started + (" Some rows are from earlier measurements." if comparison.kept else ""),
        *comparison.machine.describe(),
        *_caveats(comparison),
        "",
        f"Each preset with its default settings: {comparison.settings.description}. One run each, one after the "
        "other. Reproduce this page with:",
        "",
        "```",
        comparison.command,
        "```",
        "",
        _markdown_row(_COLUMNS),
        "|---" + "|---:" * (len(_COLUMNS) - 1) + "|",
        *(_markdown_row(_cells(row)) for row in comparison.page_rows),
        "",
        f"- **accuracy**: final test accuracy. **{_PERCENT} at**: the first epoch at whose end it reached that. "
        f"**goal**: {_goal()}.",
        "- **B/sample**: bytes sent by all workers, plus bytes received from servers, per training sample.",
        "- **samples/s**: over all workers, while training. **time**: the whole run, including startup, "
        "evaluation and checkpoints.",
    ]
    differing = [row for row in comparison.page_rows if row.workers != comparison.settings.workers]
    lines += [f"- **{row.name}** ran with {count(row.workers, 'worker')}." for row in differing]
    lines += ["", "| strategy | settings |", "|---|---|"]
    lines += [_markdown_row((row.name, f"`{row.strategy}`")) for row in comparison.page_rows]
    if comparison.failures:
        lines += ["", "## Failures"]
    for name, why in comparison.failures.items():
        lines += ["", f"**{name}**: {headline(why)}", *(["", "```", why, "```"] if "\n" in why else [])]
    return "\n".join(lines) + "\n"


def _measured(
    task: Task, preset: Preset, settings: ComparisonSettings, folder: Path, observer: RunObserver
) -> ComparisonRow:
    """One run. An error fails this row only; just Ctrl-C ends the comparison."""
    workers = _workers_of(preset, settings)
    name, strategy, run_dir = preset.name, str(preset.make()), folder / preset.name
    try:
        config = RunConfig(
            workers=workers, epochs=settings.epochs, seed=settings.seed, strategy=name, out=str(folder), name=name
        )
        result = run_task(task, config, observer)
    except Exception as error:
        where = str(run_dir) if run_dir.exists() else None
        return ComparisonRow(name=name, strategy=strategy, workers=workers, run_dir=where, failure=error_text(error))
    reached = [e.epoch for e in observer.state.evaluations if e.metrics.get(_METRIC, 0.0) >= GOAL_ACCURACY]
    return ComparisonRow(
        name=name,
        strategy=strategy,
        workers=workers,
        accuracy=result.metrics.get(_METRIC),
        goal_epoch=min(reached, default=None),
        bytes_per_sample=strategy_stats(RunDir(result.run_dir).read_events()).bytes_per_sample,
        samples_per_s=result.samples_per_s,
        seconds=result.seconds,
        run_dir=str(result.run_dir),
    )


def _workers_of(preset: Preset, settings: ComparisonSettings) -> int:
    most = getattr(preset, "workers", None) or _MOST_WORKERS.get(preset.name)
    return min(settings.workers, most) if most else settings.workers


def _earlier_rows(out: Path, settings: ComparisonSettings, names: Iterable[str]) -> list[ComparisonRow]:
    """Rows of other presets on an existing page, if it was made with the same settings."""
    try:
        page = json.loads(out.with_suffix(".json").read_text())
        if page["format"] != _FORMAT or page["settings"] != asdict(settings):
            return []
        rows = msgspec.convert(page["rows"], list[ComparisonRow])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no such page, or another format
    known = {preset.name for preset in PRESETS.values()}
    return [row for row in rows if row.name in known and row.name not in names]


def _command(settings: ComparisonSettings, only: Sequence[str], out: Path | None) -> str:
    """The command line, with the settings that differ from the defaults."""
    words = ["syncline", "strategies", "--compare"]
    for name, value in asdict(settings).items():
        if value != getattr(ComparisonSettings(), name):
            words += [f"--{name}", str(value)]
    for name in only:
        words += ["--only", name]
    return shlex.join([*words, *(["--out", str(out)] if out is not None else [])])


def _goal() -> str:
    return f"{_PERCENT} test accuracy within {count(GOAL_EPOCHS, 'epoch')}"


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    if row.failure is not None:
        return (row.name, str(row.workers), "failed", *["-"] * (len(_COLUMNS) - 4), "no")
    return (
        row.name,
        str(row.workers),
        accuracy(row.accuracy, digits=2) if row.accuracy is not None else "-",
        f"epoch {row.goal_epoch}" if row.goal_epoch is not None else "never",
        _bytes(row.bytes_per_sample),
        rate(row.samples_per_s) if row.samples_per_s is not None else "-",
        f"{row.seconds:,.0f} s" if row.seconds is not None else "-",
        "yes" if row.meets_goal else "no",
    )


def _bytes(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"{amount:.2g}" if 0 < amount < 10 else f"{amount:,.0f}"


def _row_as_dict(row: ComparisonRow) -> dict[str, Any]:
    return {**asdict(row), "meets_goal": row.meets_goal}


def _caveats(comparison: Comparison) -> list[str]:
    missing = comparison.names[len(comparison.rows) :]
    if not missing:
        return []
    how = "was interrupted" if comparison.is_interrupted else "is not complete"
    return [f"The comparison {how}; not measured: {', '.join(missing)}."]


def _markdown_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _progress_line(row: ComparisonRow, remaining: int, seconds: Sequence[float]) -> str:
    """The result of one preset, and how long the remaining ones will take."""
    if row.failure is not None:
        text = f"failed: {headline(row.failure).rstrip('.')}"
    else:
        _, _, reached, when, moved, speed, took, _ = _cells(row)
        at = f"never {_PERCENT}" if row.goal_epoch is None else f"{_PERCENT} at {when}"
        text = f"{reached} ({at}), {f'{moved} bytes/sample, ' if moved != '-' else ''}{speed} samples/s, {took}"
    rest = f"; {remaining} left" if remaining else ""
    if remaining and seconds:
        rest += f", about {duration(remaining * sum(seconds) / len(seconds))}"
    return f"{text}{rest}"
