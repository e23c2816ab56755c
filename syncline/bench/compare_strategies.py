"""`syncline strategies --compare`: every preset trains the same model on the same data, and one table tells them apart.

Here: the course of a comparison, its rows, and the table as text, Markdown and JSON. Not here: side-by-side ratios with
repeats (`harness.py`): a preset is trained once, whole and with its default settings, as a user would. Accuracy and
bytes come out the same in a repetition; the times are those of one run on this machine.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec

from syncline.bench.machine import BenchMachine
from syncline.config.run import RunConfig
from syncline.data.named import Progress as DownloadProgress
from syncline.driver import run_task
from syncline.errors import ConfigError, Interrupted, SynclineError, UnknownName
from syncline.strategies.presets import PRESETS, Preset
from syncline.task import Task
from syncline.telemetry.events import Event, Warned
from syncline.telemetry.run_dir import RunDir
from syncline.view.state import RunState
from syncline.view.strategy_account import account_of
from syncline.view.stream import unbreakable
from syncline.view.words import accuracy, clean, count, duration, headline, rate

__all__ = ["GOAL_ACCURACY", "GOAL_EPOCHS", "Comparison", "Row", "Settings", "as_dict", "as_lines", "as_markdown",
           "compare", "presets_named", "write"]  # fmt: skip

GOAL_ACCURACY = 0.985
GOAL_EPOCHS = 5
_METRIC = "test/accuracy"
_FORMAT = 1
_MOST_WORKERS = {"hogwild": 2}
"""For presets that do not say so themselves: lock-free updates of one memory are compared with two workers."""
_PERCENT = f"{100 * GOAL_ACCURACY:g}%"
_COLUMNS = ("strategy", "workers", "accuracy", f"{_PERCENT} at", "B/sample", "samples/s", "time", "goal")
"""Short ones: with the names and figures of today the table takes 80 columns."""
_DRAW_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every preset is given alike."""

    model: str = "lenet"
    data: str = "mnist"
    workers: int = 4
    epochs: int = GOAL_EPOCHS
    seed: int = 0

    @property
    def in_words(self) -> str:
        """`lenet on mnist, 4 workers, 5 epochs, seed 0`."""
        how = f"{count(self.workers, 'worker')}, {count(self.epochs, 'epoch')}, seed {self.seed}"
        return f"{self.model} on {self.data}, {how}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one preset came to. What a run that failed did not come to is None, and `failure` says why."""

    name: str
    strategy: str
    workers: int
    accuracy: float | None = None
    """On the test data, at the end."""
    goal_epoch: int | None = None
    """The first epoch after which the accuracy was that of the goal; None: never."""
    bytes_per_sample: float | None = None
    """Sent and received by all workers together; None if the run did not record it."""
    samples_per_s: float | None = None
    seconds: float | None = None
    run_dir: str | None = None
    failure: str | None = None

    @property
    def meets_goal(self) -> bool | None:
        """Whether the accuracy of the goal was reached in time; None if the run failed."""
        if self.failure is not None:
            return None
        return self.goal_epoch is not None and self.goal_epoch <= GOAL_EPOCHS


@dataclass
class Comparison:
    """All that one comparison measured, complete or not."""

    settings: Settings
    machine: BenchMachine
    names: tuple[str, ...]
    """The presets that were to be measured."""
    command: str
    """What to type to measure it again."""
    started: float = field(default_factory=time.time)
    rows: list[Row] = field(default_factory=list)
    is_interrupted: bool = False
    kept: list[Row] = field(default_factory=list)
    """From an earlier page in the same place: presets that were not to be measured again."""

    @property
    def failures(self) -> dict[str, str]:
        """What did not work, and why, whole."""
        return {row.name: row.failure for row in self.rows if row.failure is not None}

    @property
    def page_rows(self) -> list[Row]:
        """What was kept and what was measured, in the order of the presets."""
        order = [preset.name for preset in PRESETS.values()]
        return sorted([*self.kept, *self.rows], key=lambda row: order.index(row.name))


def presets_named(names: Iterable[str]) -> list[Preset]:
    """The presets in the order given, each once; all of them if none is given."""
    found = []
    for name in dict.fromkeys(name.strip().replace("-", "_") for name in names):
        if name not in PRESETS:
            raise UnknownName.among("strategy", name.replace("_", "-"), [p.name for p in PRESETS.values()])
        found.append(PRESETS[name])
    return found or list(PRESETS.values())


def compare(
    settings: Settings,
    *,
    only: Sequence[str] = (),
    out: Path | None = None,
    as_json: bool = False,
    download_progress: DownloadProgress | None = None,
) -> Comparison:
    """Train every preset (or those called `only`), one after the other; show the table and write it to `out`.

    The file is written anew after each preset, with JSON beside it; with `only`, the rows of others stay if they were
    measured with the same settings. `Interrupted` after Ctrl-C and `SynclineError` if a
    preset failed, both after the rest was shown and written. A goal that is not met is a finding and not an error.
    """
    presets = presets_named(only)
    # Everything that a user can get wrong is answered here, and not by every preset in turn.
    RunConfig(workers=settings.workers, epochs=settings.epochs, seed=settings.seed)
    _check_place(out)
    task = Task(model=settings.model, data=settings.data)
    task = task.with_defaults().located(None, download_progress)
    folder = RunDir.new(Path("runs"), f"compare-{time.strftime('%Y%m%d-%H%M%S')}", exact=False).path
    file = out if out is not None else folder / "strategies.md"
    names = tuple(preset.name for preset in presets)
    kept = _earlier_rows(out, settings, names) if only and out is not None else []
    command = _command(settings, () if kept else only, out)  # what makes the whole page again
    found = Comparison(settings, BenchMachine.here(), names, command, kept=kept)
    teller: _Teller = _JsonTeller(sys.stdout) if as_json else _TextTeller(sys.stdout, sys.stderr)
    teller.began(found)
    try:
        for number, preset in enumerate(presets, 1):
            view = teller.watching(preset.name, number, len(presets))
            row = _measured(task, preset, settings, folder, view)
            found.rows.append(row)
            write(found, file)
            teller.measured(row, left=len(presets) - number)
    except KeyboardInterrupt:
        found.is_interrupted = True
        if found.rows:  # an earlier table is worth more than an empty one
            write(found, file)
    teller.ended(found, file)
    if found.is_interrupted:
        where = f"What was measured by then is in {file}." if found.rows else "Nothing was measured by then."
        raise Interrupted(f"Stopped. {where}")
    if found.failures:
        raise SynclineError(f"Not every strategy could be measured; {file} says which and why.")
    return found


def write(comparison: Comparison, file: Path) -> None:
    """The Markdown for people, and the JSON for programs beside it."""
    RunDir.write(file, as_markdown(comparison).encode())
    RunDir.write(file.with_suffix(".json"), (json.dumps(as_dict(comparison), indent=1) + "\n").encode())


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """As plain data."""
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
    """As plain text, the table within 80 columns as long as the names are."""
    yield f"{comparison.settings.in_words}; the goal is {_goal()}."
    yield ""
    rows = [_COLUMNS, *(_cells(row) for row in comparison.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
    yield ""
    yield from _caveats(comparison)
    yield from (f"{name} failed: {headline(why)}" for name, why in comparison.failures.items())
    yield from comparison.machine.in_words()


def as_markdown(comparison: Comparison) -> str:
    """As a page."""
    started = time.strftime("Measured on %Y-%m-%d at %H:%M UTC.", time.gmtime(comparison.started))
    lines = [
        "# The strategies compared",
        "",
        started + (" Some rows are from before." if comparison.kept else ""),
        *comparison.machine.in_words(),
        *_caveats(comparison),
        "",
        f"Each strategy by its name, with its default settings: {comparison.settings.in_words}. One run each, one "
        "after the other. Make this page again with:",
        "",
        "```",
        comparison.command,
        "```",
        "",
        _markdown_row(_COLUMNS),
        "|---" + "|---:" * (len(_COLUMNS) - 1) + "|",
        *(_markdown_row(_cells(row)) for row in comparison.page_rows),
        "",
        f"- **accuracy**: on the test data, at the end. **{_PERCENT} at**: the first epoch at whose end it was that "
        f"high. **goal**: {_goal()}.",
        "- **B/sample**: bytes that all workers together sent, and received from servers, for each sample trained on.",
        "- **samples/s**: of all workers together, while training. **time**: the whole run, with its start, its "
        "evaluations and its checkpoints.",
    ]
    differing = [row for row in comparison.page_rows if row.workers != comparison.settings.workers]
    lines += [f"- **{row.name}** was run with {count(row.workers, 'worker')}." for row in differing]
    lines += ["", "| strategy | what, when, whom, how |", "|---|---|"]
    lines += [_markdown_row((row.name, f"`{row.strategy}`")) for row in comparison.page_rows]
    if comparison.failures:
        lines += ["", "## What did not work"]
    for name, why in comparison.failures.items():
        lines += ["", f"**{name}**: {headline(why)}", *(["", "```", why, "```"] if "\n" in why else [])]
    return "\n".join(lines) + "\n"


def _measured(task: Task, preset: Preset, settings: Settings, folder: Path, view: _Watching) -> Row:
    """One run. What goes wrong in it is this row's failure and nobody else's; only Ctrl-C ends the comparison."""
    workers = _workers_of(preset, settings)
    name, strategy, run_dir = preset.name, str(preset.make()), folder / preset.name
    try:
        config = RunConfig(
            workers=workers, epochs=settings.epochs, seed=settings.seed, strategy=name, out=str(folder), name=name
        )
        result = run_task(task, config, view)
    except Exception as error:
        text = str(error).strip() or "no message"
        why = text if isinstance(error, SynclineError) else f"{type(error).__name__}: {text}"
        where = str(run_dir) if run_dir.exists() else None
        return Row(name=name, strategy=strategy, workers=workers, run_dir=where, failure=why)
    reached = [e.epoch for e in view.state.evaluations if e.metrics.get(_METRIC, 0.0) >= GOAL_ACCURACY]
    return Row(
        name=name,
        strategy=strategy,
        workers=workers,
        accuracy=result.metrics.get(_METRIC),
        goal_epoch=min(reached, default=None),
        bytes_per_sample=account_of(RunDir(result.run_dir).read_events()).bytes_per_sample,
        samples_per_s=result.samples_per_s,
        seconds=result.seconds,
        run_dir=str(result.run_dir),
    )


def _workers_of(preset: Preset, settings: Settings) -> int:
    most = getattr(preset, "workers", None) or _MOST_WORKERS.get(preset.name)
    return min(settings.workers, most) if most else settings.workers


def _check_place(out: Path | None) -> None:
    """A place that cannot be written to must not cost an hour of training."""
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder. Give a file, such as {out / 'strategies.md'}.")
    if out.suffix == ".json":
        raise ConfigError(f"--out {out} is for Markdown; JSON is written beside it. Try {out.with_suffix('.md')}.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Choose another file with --out.") from error


def _earlier_rows(out: Path, settings: Settings, names: Iterable[str]) -> list[Row]:
    """Of the page that is there already, the rows of other presets, if it was made with the same settings."""
    try:
        page = json.loads(out.with_suffix(".json").read_text())
        if page["format"] != _FORMAT or page["settings"] != asdict(settings):
            return []
        rows = msgspec.convert(page["rows"], list[Row])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no page, or none of ours
    known = {preset.name for preset in PRESETS.values()}
    return [row for row in rows if row.name in known and row.name not in names]


def _command(settings: Settings, only: Sequence[str], out: Path | None) -> str:
    """What differs from the defaults, as a user would type it."""
    words = ["syncline", "strategies", "--compare"]
    for name, value in asdict(settings).items():
        if value != getattr(Settings(), name):
            words += [f"--{name}", str(value)]
    for name in only:
        words += ["--only", name]
    return shlex.join([*words, *(["--out", str(out)] if out is not None else [])])


def _goal() -> str:
    return f"{_PERCENT} test accuracy within {count(GOAL_EPOCHS, 'epoch')}"


def _cells(row: Row) -> tuple[str, ...]:
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


def _row_as_dict(row: Row) -> dict[str, Any]:
    return {**asdict(row), "meets_goal": row.meets_goal}


def _caveats(comparison: Comparison) -> list[str]:
    missing = comparison.names[len(comparison.rows) :]
    if not missing:
        return []
    why = "was interrupted" if comparison.is_interrupted else "is not complete"
    return [f"The comparison {why}; not measured: {', '.join(missing)}."]


def _markdown_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


class _Watching:
    """The view of one run: it keeps what the row needs, and passes on what is worth telling."""

    def __init__(self, name: str, teller: _Teller) -> None:
        self.name, self.state, self._teller = name, RunState(), teller

    def on_event(self, event: Event) -> None:
        """Take it in."""
        self.state.apply(event)
        self._teller.happened(self, event)

    def close(self) -> None:
        """Nothing more will happen."""


class _Teller(Protocol):
    def began(self, comparison: Comparison) -> None: ...

    def watching(self, name: str, number: int, total: int) -> _Watching: ...

    def happened(self, watching: _Watching, event: Event) -> None: ...

    def measured(self, row: Row, left: int) -> None: ...

    def ended(self, comparison: Comparison, file: Path) -> None: ...


class _TextTeller:
    """A line for each preset on stderr, and on a terminal one below it that moves; the table goes to stdout."""

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self._out, self._errors = unbreakable(out), unbreakable(errors)
        self._is_terminal = errors.isatty()
        self._where = ""
        self._seconds: list[float] = []
        self._run_began_s = self._last_drawn_s = 0.0

    def began(self, comparison: Comparison) -> None:
        number = len(comparison.names)
        self._line(f"{comparison.settings.in_words}: {number} {'strategy' if number == 1 else 'strategies'}")

    def watching(self, name: str, number: int, total: int) -> _Watching:
        self._where = f"{number:>{len(str(total))}}/{total} {name}"
        self._run_began_s, self._last_drawn_s = time.monotonic(), 0.0
        if not self._is_terminal:
            self._line(f"{self._where}: training")
        return _Watching(name, self)

    def happened(self, watching: _Watching, event: Event) -> None:
        if isinstance(event, Warned):
            self._line(f"{self._where}: warning: {clean(event.message)}")
        now = time.monotonic()
        if not self._is_terminal or now - self._last_drawn_s < _DRAW_EVERY_S:
            return
        self._last_drawn_s = now
        state = watching.state
        parts = [f"{self._where}: "]
        parts.append("starting" if state.is_starting else f"epoch {state.epoch}/{state.plan.epochs}")
        if state.samples_per_s:
            parts.append(f", {rate(state.samples_per_s)} samples/s")
        if state.left_s is not None:
            parts.append(f", {duration(state.left_s)} left")
        text = "".join(parts)[: shutil.get_terminal_size().columns - 1]
        self._errors.write(f"\r\033[K{text}")
        self._errors.flush()

    def measured(self, row: Row, left: int) -> None:
        if row.failure is not None:
            told = f"failed: {headline(row.failure).rstrip('.')}"
        else:
            self._seconds.append(time.monotonic() - self._run_began_s)
            _, _, reached, when, moved, speed, took, _ = _cells(row)
            at = f"never {_PERCENT}" if row.goal_epoch is None else f"{_PERCENT} at {when}"
            told = f"{reached} ({at}), {f'{moved} bytes/sample, ' if moved != '-' else ''}{speed} samples/s, {took}"
        rest = f"; {left} left" if left else ""
        if left and self._seconds:  # how long a failure took says nothing of the others
            rest += f", about {duration(left * sum(self._seconds) / len(self._seconds))}"
        self._line(f"{self._where}: {told}{rest}")

    def ended(self, comparison: Comparison, file: Path) -> None:
        self._line("")
        if not comparison.rows:
            return
        self._out.write("".join(f"{line}\n" for line in as_lines(comparison)))
        self._out.flush()
        self._line(f"Written to {file} and {file.with_suffix('.json')}.")

    def _line(self, text: str) -> None:
        start = "\r\033[K" if self._is_terminal else ""
        self._errors.write(f"{start}{text}\n")
        self._errors.flush()


class _JsonTeller:
    """One JSON object a line; the last one is the comparison."""

    def __init__(self, out: TextIO) -> None:
        self._out = unbreakable(out)

    def began(self, comparison: Comparison) -> None:
        self._line({"event": "began", "strategies": comparison.names, "settings": asdict(comparison.settings)})

    def watching(self, name: str, number: int, total: int) -> _Watching:
        self._line({"event": "training", "name": name, "number": number, "of": total})
        return _Watching(name, self)

    def happened(self, watching: _Watching, event: Event) -> None:
        if isinstance(event, Warned):
            self._line({"event": "warned", "name": watching.name, "message": event.message})

    def measured(self, row: Row, left: int) -> None:
        self._line({"event": "measured", **_row_as_dict(row), "left": left})

    def ended(self, comparison: Comparison, file: Path) -> None:
        self._line({"event": "summary", "file": str(file), **as_dict(comparison)})

    def _line(self, data: dict[str, Any]) -> None:
        self._out.write(json.dumps(data) + "\n")
        self._out.flush()
