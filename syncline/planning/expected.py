"""`Expected`: what was predicted of a run, in its directory; and `compare`, which sets what came beside it.

    RUN/expected.json

Here: plain data, its file, and the comparison, term by term. Not here: predicting (`cost/`), when a run is predicted
and from what (`forecaster.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from syncline.config.owned_files import open_regular
from syncline.planning.cost.profile import COMPUTE, Fact
from syncline.planning.cost.ranges import Range

_PART_OF_EXCHANGE = ("waiting", "encoding", "scoring")
"""Terms that a run reports as part of its exchange, unless its transport measures them."""
_FEWEST_STEPS = 2
_DISTURBED = 1.3
"""If each phase of computing takes so many times as long, it is not the strategy."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a run was expected to take, or why nothing was predicted."""

    strategy: str
    layout: str
    workers: int
    batch: int
    source: str
    """What the prediction was made from, as a sentence."""
    is_from_own_steps: bool = False
    """Whether computing was measured in the first steps of the run itself, so that only the rest is predicted."""
    terms: Mapping[str, Range] = field(default_factory=dict)
    """Seconds of a step, by term; none if nothing was predicted."""
    bytes_per_step: float = 0.0
    memory_bytes: Range = field(default_factory=lambda: Range.exactly(0.0))
    """Of a worker; 0 if it was not known."""
    made_at: float = field(default_factory=time.time)

    @property
    def is_prediction(self) -> bool:
        return bool(self.terms)

    @property
    def step_s(self) -> Range:
        return Range.sum(self.terms.values())

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_expected(path: Path) -> Expected | None:
    """What was predicted of a run; None if it was made without, or the file is damaged."""
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=Expected)
    except (OSError, ValueError, RecursionError):  # a damaged range is a ValueError, too
        return None


@dataclass(frozen=True)
class Row:
    """One term: predicted, and measured."""

    name: str
    predicted: Range
    measured: float

    @property
    def error(self) -> float | None:
        """By which part of what came the prediction was too high, or, if negative, too low."""
        return self.predicted.mid / self.measured - 1 if self.measured > 0 else None

    @property
    def is_in_range(self) -> bool:
        return self.measured in self.predicted


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Prediction and fact of a run."""

    expected: Expected
    terms: tuple[Row, ...]
    step: Row
    bytes: Row
    memory: Row | None

    @property
    def rows(self) -> tuple[Row, ...]:
        """All of them."""
        return (*self.terms, self.step, self.bytes, *([self.memory] if self.memory is not None else []))

    @property
    def summary(self) -> str:
        """One sentence on the step."""
        error = self.step.error or 0.0
        off = (
            "as predicted"
            if abs(error) < 0.005
            else f"predicted {abs(error):.0%} too {'long' if error > 0 else 'short'}"
        )
        worst = max(self.terms, key=lambda row: abs(row.predicted.mid - row.measured))
        missed_s = worst.predicted.mid - worst.measured
        if abs(missed_s) < 0.02 * self.step.measured:
            return f"A step was {off}."
        part = abs(missed_s) / self.step.measured
        said = f"A step was {off}; the term that was missed most is {worst.name}, by {part:.0%} of a step."
        return f"{said} {self._disturbance}".rstrip()

    @property
    def _disturbance(self) -> str:
        """What a strategy does not explain: each phase of computing took longer, or shorter."""
        ratios = [row.measured / row.predicted.mid for row in self.terms if row.name in COMPUTE and row.predicted.mid]
        if len(ratios) > 1 and min(ratios) >= _DISTURBED:
            return (
                f"Each phase of computing took at least {min(ratios):.2g} times as long as predicted: something else "
                "was using the machine."
            )
        return ""


def compare(expected: Expected, fact: Fact) -> Comparison | None:
    """Prediction against fact; None without a prediction, or if too few steps were taken."""
    if not expected.is_prediction or fact.steps < _FEWEST_STEPS:
        return None
    predicted, measured = dict(expected.terms), dict(fact.terms)
    for name in _PART_OF_EXCHANGE:
        if name in predicted and name not in measured:
            predicted["exchange"] = predicted.get("exchange", Range.exactly(0.0)) + predicted.pop(name)
    names = [*predicted, *(name for name in measured if name not in predicted)]
    rows = tuple(Row(name, predicted.get(name, Range.exactly(0.0)), measured.get(name, 0.0)) for name in names)
    known = expected.memory_bytes.mid > 0 and fact.memory_bytes > 0
    return Comparison(
        expected=expected,
        terms=rows,
        step=Row("step", expected.step_s, fact.step_s),
        bytes=Row("bytes/step", Range.exactly(expected.bytes_per_step), fact.bytes_per_step),
        memory=Row("memory", expected.memory_bytes, float(fact.memory_bytes)) if known else None,
    )


def as_text(found: Comparison) -> str:
    """The comparison as a table."""
    rows = [("", "predicted", "range", "came", "error")]
    rows += [_cells(row, 1e3, "ms") for row in (*found.terms, found.step)]
    rows.append(_cells(found.bytes, 1.0, "bytes"))
    if found.memory is not None:
        rows.append(_cells(found.memory, 1e-6, "MB"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(row: Row, factor: float, unit: str) -> tuple[str, str, str, str, str]:
    low, mid, high = (number(factor * value) for value in (row.predicted.low, row.predicted.mid, row.predicted.high))
    return row.name, f"{mid} {unit}", f"{low} to {high}", f"{number(factor * row.measured)} {unit}", error_text(row)


def error_text(row: Row) -> str:
    """`+4%` if too much was predicted; empty where nothing came."""
    return "" if row.error is None else f"{row.error:+.0%}" if abs(row.error) < 10 else "> 10 times"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first = f"{row[0]:<{widths[0]}}"
    return "  ".join([first, *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
