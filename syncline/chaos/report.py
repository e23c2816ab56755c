"""A score card in words: as text for people, as plain data for programs.

Here: tables and sentences. Not here: the figures (`score.py`), and what is shown while it goes on (`telling.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.bench.machine import BenchMachine
from syncline.chaos.score import Card, Recovery, Row, Times
from syncline.telemetry.run_dir import RunDir
from syncline.view.words import count, duration, headline, metric

__all__ = ["as_dict", "as_lines", "in_words", "times_in_words", "write"]

_FORMAT = 1
_QUICKLY_S = 0.5
"""What was noticed sooner than this is not worth telling one by one."""
_MOST_TOLD = 12
_MOST_STRAYS = 5
"""So many blows are told one by one; of more than that, only those that did not end well."""


def as_lines(card: Card, machine: BenchMachine) -> Iterator[str]:
    """As plain text, the table within 80 columns as long as the names are."""
    total = card.total()
    yield f"{card.what}: {_blows(total.blows)} in {count(total.runs, 'run')}, seed {card.seed}"
    yield ""
    yield from _table(card)
    yield ""
    if total.went_on is not None:
        yield f"From a blow to the next step that counts: {times_in_words(total.went_on)}."
    if total.noticed is not None:
        yield f"Until it was noticed: {times_in_words(total.noticed)}."
    if total.whole is not None:
        yield f"Until all workers were there again: {times_in_words(total.whole)}."
    if total.redone:
        yield f"Steps that were done again: {total.redone:,}."
    yield from _spread_of_seeds(card)
    yield from _one_by_one(card)
    yield _verdict(card, total)
    for score in card.scores:
        if score.why is not None:
            yield f"{score.strategy} (seed {score.seed}) {score.outcome}: {headline(score.why)}  {score.run_dir or ''}"
        if score.samples is not None and not score.samples.is_clean:
            yield from (f"{score.strategy} (seed {score.seed}): {line}" for line in score.samples.words)
        for stray in score.strays[:_MOST_STRAYS]:
            yield f"{score.strategy} (seed {score.seed}): {stray}, though nothing was done to it  {score.run_dir}"
        if more := score.strays[_MOST_STRAYS:]:
            yield f"{score.strategy} (seed {score.seed}): and {len(more):,} more like that."
        for fault in score.missed:
            yield f"{score.strategy} (seed {score.seed}): it never came to '{fault}'."
    yield from (f"{name} was left out: {headline(why)}" for name, why in card.left_out.items())
    yield from machine.in_words()
    yield f"Again with: {card.command}"


def as_dict(card: Card, machine: BenchMachine) -> dict[str, Any]:
    """As plain data."""
    total = card.total()
    return {
        "format": _FORMAT,
        "what": card.what,
        "command": card.command,
        "seed": card.seed,
        "is_interrupted": card.is_interrupted,
        "metric": card.metric,
        "problems": card.problems,
        "total": asdict(total),
        "rows": [asdict(row) for row in card.rows()],
        "runs": [asdict(score) for score in card.scores],
        "references": [asdict(reference) for reference in card.references],
        "left_out": card.left_out,
        "machine": machine.to_dict(),
    }


def write(card: Card, machine: BenchMachine, file: Path) -> None:
    """The text for people, and the JSON for programs beside it."""
    RunDir.write(file, "".join(f"{line}\n" for line in as_lines(card, machine)).encode())
    RunDir.write(file.with_suffix(".json"), (json.dumps(as_dict(card, machine), indent=1) + "\n").encode())


def in_words(recovery: Recovery) -> str:
    """What was done, and what came of it, in a line."""
    blow = recovery.blow
    where = "" if " at step " in blow.what else f" at step {blow.step}"
    said = {
        "recovered": f"the others went on after {_time(recovery.went_on_s or 0.0)}",
        "borne": "the run went on",
        "too late": "the run was over by then",
        "hang": "a hang",
        "fatal": "the run failed",
        "open": "stopped before it was settled",
    }[recovery.came]
    if recovery.came == "recovered" and (recovery.noticed_s or 0.0) > _QUICKLY_S:
        said += f", noticed after {_time(recovery.noticed_s or 0.0)}"
    if recovery.redone:
        said += f", {count(recovery.redone, 'step')} back"
    return f"{blow.what}{where}: {said}"


def times_in_words(times: Times) -> str:
    """`p50 74 ms, p95 197 ms, longest 298 ms (50 times)`."""
    if times.count == 1:
        return _time(times.most)
    return f"p50 {_time(times.p50)}, p95 {_time(times.p95)}, longest {_time(times.most)} ({times.count} times)"


def _table(card: Card) -> Iterator[str]:
    heads = ("strategy", "faults", "hangs", "p95", "redone", "lost", "twice", _short(card.metric), "unharmed")
    rows = card.rows()
    cells = [heads, *(_cells(row, card.metric) for row in rows)]
    if len(rows) > 1:
        cells.append(_cells(card.total(), None))
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])


def _cells(row: Row, name: str | None) -> tuple[str, ...]:
    p95 = _time(row.went_on.p95) if row.went_on else "-"
    counts = ["-" if n is None else f"{n:,}" for n in (row.redone, row.lost, row.repeated)]
    scores = [_mean(values, name) for values in (row.metrics, row.reference)]
    return (row.name, str(row.blows), str(row.hangs), p95, *counts, *scores)


def _mean(values: Sequence[float], name: str | None) -> str:
    return metric(name, sum(values) / len(values)) if values and name else "-"


def _spread_of_seeds(card: Card) -> Iterator[str]:
    """How much of a difference may be only the seed's, where there is more than one run to tell it by."""
    for row in card.rows():
        if card.metric is not None and len(row.reference) > 1 and row.metrics:
            harmed, unharmed = (_range(values, card.metric) for values in (row.metrics, row.reference))
            yield f"{row.name}, by seed: {card.metric} {harmed} with faults, {unharmed} unharmed."


def _range(values: Sequence[float], name: str) -> str:
    low, high = metric(name, min(values)), metric(name, max(values))
    return low if low == high else f"{low} to {high}"


def _short(name: str | None) -> str:
    return (name or "metric").removeprefix("test/")


def _one_by_one(card: Card) -> Iterator[str]:
    told = [(score, recovery) for score in card.scores for recovery in score.recoveries]
    if len(told) > _MOST_TOLD:
        told = [(score, r) for score, r in told if r.came not in ("recovered", "borne", "too late")]
    several = len({score.strategy for score in card.scores}) > 1
    for score, recovery in told:
        yield f"  {score.strategy + ': ' if several else ''}{in_words(recovery)}"


def _verdict(card: Card, total: Row) -> str:
    if card.is_interrupted:
        missing = max(0, card.kills_wanted - total.blows)
        begun = "Stopped before the end" + (f", {_blows(missing)} short" if missing else "")
    else:
        begun = ""
    if card.problems:
        return f"{begun + '. ' if begun else ''}Not well: {'; '.join(card.problems)}."
    if not total.runs:
        return f"{begun or 'Nothing was tried'}."
    kept = "0 samples lost, 0 used twice" if total.lost is not None else "no account of samples was kept"
    ended = "every run came to its end" if total.finished == total.runs else "so far nothing was amiss"
    return f"{begun + ': ' if begun else ''}0 hangs, {kept}, {ended}."


def _time(seconds: float) -> str:
    """In whole milliseconds up to a second: here they are what matters."""
    return f"{1000 * seconds:.0f} ms" if 0 <= seconds < 0.9995 else duration(seconds)


def _blows(amount: int) -> str:
    return count(amount, "fault")
