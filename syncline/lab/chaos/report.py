"""The scorecard as text for people and as plain data for programs.

Here: tables and sentences. Not here: the figures (`score.py`), progress while runs train (`lab/output.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.lab.chaos.score import Recovery, RecoveryTimes, Scorecard, ScoreRow
from syncline.lab.machine import BenchMachine
from syncline.lab.output import table_lines, write_results
from syncline.observe.formatting import count, duration, headline, metric

_FORMAT = 2
_QUICKLY_S = 0.5
"""A detection time below this is not worth a mention on each line."""
_MAX_LISTED = 12
"""Beyond this many faults, only those that went wrong are listed one by one."""
_MAX_UNEXPECTED = 5


def as_lines(card: Scorecard, machine: BenchMachine) -> Iterator[str]:
    """As plain text; the table fits 80 columns unless a strategy's name is very long."""
    total = card.total()
    yield f"{card.title}: {count(total.injections, 'fault')} in {count(total.runs, 'run')}, seed {card.seed}"
    yield ""
    yield from _table(card)
    yield ""
    if total.recovery is not None:
        yield f"Fault to the survivors' first step: {describe_times(total.recovery)}."
    if total.detection is not None:
        yield f"Fault to its detection: {describe_times(total.detection)}."
    if total.restoration is not None:
        yield f"Fault to all workers training again: {describe_times(total.restoration)}."
    if total.redone:
        yield f"Steps redone: {total.redone:,}."
    yield from _spread_of_seeds(card)
    yield from _one_by_one(card)
    yield _verdict(card, total)
    for score in card.scores:
        run = f"{score.strategy} (seed {score.seed})"
        if score.reason is not None:
            yield f"{run} {score.outcome}: {headline(score.reason)}  {score.run_dir or ''}"
        if score.samples is not None and not score.samples.is_clean:
            yield from (f"{run}: {line}" for line in score.samples.lines)
        for failure in score.unexpected[:_MAX_UNEXPECTED]:
            yield f"{run}: {failure}, without an injected fault  {score.run_dir}"
        if more := score.unexpected[_MAX_UNEXPECTED:]:
            yield f"{run}: {len(more):,} more unexpected failures."
        for fault in score.missed_faults:
            yield f"{run}: '{fault}' never happened."
    yield from (f"{name} was skipped: {headline(reason)}" for name, reason in card.skipped.items())
    yield from machine.describe()
    yield f"Reproduce with: {card.command}"


def as_dict(card: Scorecard, machine: BenchMachine) -> dict[str, Any]:
    total = card.total()
    return {
        "format": _FORMAT,
        "title": card.title,
        "command": card.command,
        "seed": card.seed,
        "is_interrupted": card.is_interrupted,
        "metric": card.metric,
        "problems": card.problems,
        "total": asdict(total),
        "rows": [asdict(row) for row in card.rows()],
        "runs": [asdict(score) for score in card.scores],
        "references": [asdict(reference) for reference in card.references],
        "skipped": card.skipped,
        "machine": machine.to_dict(),
    }


def write(card: Scorecard, machine: BenchMachine, file: Path) -> None:
    """The text, and the JSON beside it."""
    write_results(file, "".join(f"{line}\n" for line in as_lines(card, machine)), as_dict(card, machine))


def describe(recovery: Recovery) -> str:
    """The fault and its result, on one line."""
    injection = recovery.injection
    where = "" if " at step " in injection.what else f" at step {injection.step}"
    text = {
        "recovered": f"survivors continued after {_time(recovery.recovered_s or 0.0)}",
        "tolerated": "no worker failed",
        "too late": "training was already complete",
        "hang": "the run hung",
        "fatal": "the run failed",
        "unresolved": "the run was stopped first",
    }[recovery.result]
    if recovery.result == "recovered" and (recovery.detected_s or 0.0) > _QUICKLY_S:
        text += f", detected after {_time(recovery.detected_s or 0.0)}"
    if recovery.redone:
        text += f", {count(recovery.redone, 'step')} redone"
    return f"{injection.what}{where}: {text}"


def describe_times(times: RecoveryTimes) -> str:
    """`p50 74 ms, p95 197 ms, max 298 ms (50 times)`."""
    if times.count == 1:
        return _time(times.most)
    return f"p50 {_time(times.p50)}, p95 {_time(times.p95)}, max {_time(times.most)} ({times.count} times)"


def _table(card: Scorecard) -> Iterator[str]:
    heads = ("strategy", "faults", "hangs", "p95", "redone", "lost", "dups", _short(card.metric), "no faults")
    rows = card.rows()
    cells = [heads, *(_cells(row, card.metric) for row in rows)]
    if len(rows) > 1:
        cells.append(_cells(card.total(), None))
    yield from table_lines(cells)


def _cells(row: ScoreRow, name: str | None) -> tuple[str, ...]:
    p95 = _time(row.recovery.p95) if row.recovery else "-"
    counts = ["-" if n is None else f"{n:,}" for n in (row.redone, row.lost, row.repeated)]
    scores = [_mean(values, name) for values in (row.metrics, row.reference)]
    return (row.name, str(row.injections), str(row.hangs), p95, *counts, *scores)


def _mean(values: Sequence[float], name: str | None) -> str:
    return metric(name, sum(values) / len(values)) if values and name else "-"


def _spread_of_seeds(card: Scorecard) -> Iterator[str]:
    """How much of a difference the seed alone explains, if there are several reference runs."""
    for row in card.rows():
        if card.metric is not None and len(row.reference) > 1 and row.metrics:
            with_faults, without = (_range(values, card.metric) for values in (row.metrics, row.reference))
            yield f"{row.name}, by seed: {card.metric} {with_faults} with faults, {without} without."


def _range(values: Sequence[float], name: str) -> str:
    low, high = metric(name, min(values)), metric(name, max(values))
    return low if low == high else f"{low} to {high}"


def _short(name: str | None) -> str:
    return (name or "metric").removeprefix("test/")


def _one_by_one(card: Scorecard) -> Iterator[str]:
    listed = [(score, recovery) for score in card.scores for recovery in score.recoveries]
    if len(listed) > _MAX_LISTED:
        listed = [(score, r) for score, r in listed if r.result not in ("recovered", "tolerated", "too late")]
    several = len({score.strategy for score in card.scores}) > 1
    for score, recovery in listed:
        yield f"  {score.strategy + ': ' if several else ''}{describe(recovery)}"


def _verdict(card: Scorecard, total: ScoreRow) -> str:
    start = ""
    if card.is_interrupted:
        missing = max(0, card.kills_wanted - total.injections)
        start = "Stopped early" + (f", {count(missing, 'fault')} short" if missing else "")
    if card.problems:
        return f"{start + '. ' if start else ''}FAILED: {'; '.join(card.problems)}."
    if not total.runs:
        return f"{start or 'No run was started'}."
    samples = "0 samples lost, 0 repeated" if total.lost is not None else "no sample audit"
    ended = "every run finished" if total.finished == total.runs else "no problems so far"
    return f"{start + ': ' if start else ''}0 hangs, {samples}, {ended}."


def _time(seconds: float) -> str:
    """In whole milliseconds below a second: recoveries are that fast."""
    return f"{1000 * seconds:.0f} ms" if 0 <= seconds < 0.9995 else duration(seconds)
