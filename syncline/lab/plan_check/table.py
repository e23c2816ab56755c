"""The errors of predictions, and their table. Pure.

Here: `Checked`, one strategy of a cell, predicted and measured; `Errors`, what all of them show; text and JSON. Not
here: running them (`cells.py`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

_AS_GOOD = 1.05
"""The chosen plan is as good as the best measured one if its step takes at most so many times as long."""
_FEWEST_TO_RANK = 3


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One strategy with one model in one environment: milliseconds, bytes and megabytes, predicted and measured."""

    model: str
    place: str
    strategy: str
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    predicted_bytes: float
    measured_bytes: float | None
    """None if exchanges are rarer than every step: a short run ends between two."""
    predicted_mb: float
    measured_mb: float
    worst_term: str = ""
    """Which term was missed most, and by which part of the step."""
    load: float = 0.0
    """Of the machine, when it was measured."""

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.place, self.strategy


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What a set of predictions was worth."""

    count: int
    median: float
    p95: float
    in_range: float
    """The part of the measured steps that lie in the predicted range."""
    bytes: float | None
    """The largest error of the bytes of a step."""
    memory: float
    """The median error."""
    tau: float | None
    """Kendall's, of the order of the strategies, as a mean over cells."""
    chosen: float | None
    """The part of the cells in which the quickest predicted strategy is within 5% of the quickest measured one."""


def errors_of(found: Sequence[Checked]) -> Errors:
    """Over all cells that these are of."""
    off = sorted(abs(one.error) for one in found)
    cells = [list(group) for _, group in itertools.groupby(sorted(found, key=lambda c: c.key[:2]), lambda c: c.key[:2])]
    ranked = [cell for cell in cells if len(cell) >= _FEWEST_TO_RANK]
    taus = [kendall([c.predicted_ms for c in cell], [c.measured_ms for c in cell]) for cell in ranked]
    good = [_is_good_choice(cell) for cell in ranked]
    sent = [abs(c.predicted_bytes / c.measured_bytes - 1) for c in found if c.measured_bytes]
    memory = [abs(c.predicted_mb / c.measured_mb - 1) for c in found if c.measured_mb and c.predicted_mb]
    return Errors(
        count=len(found),
        median=statistics.median(off),
        p95=off[min(len(off) - 1, round(0.95 * (len(off) - 1)))],
        in_range=statistics.fmean(c.low_ms <= c.measured_ms <= c.high_ms for c in found),
        bytes=max(sent, default=None),
        memory=statistics.median(memory) if memory else 0.0,
        tau=statistics.fmean(taus) if taus else None,
        chosen=statistics.fmean(good) if good else None,
    )


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """The rank correlation of two orders: 1 if they are the same, -1 if one is the reverse of the other."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    agree = sum(_sign(one[a] - one[b]) * _sign(other[a] - other[b]) for a, b in pairs)
    return agree / len(pairs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _is_good_choice(cell: Sequence[Checked]) -> bool:
    chosen = min(cell, key=lambda c: c.predicted_ms)
    return chosen.measured_ms <= _AS_GOOD * min(c.measured_ms for c in cell)


def lines_of(found: Sequence[Checked]) -> list[str]:
    """The table by cell, and in total, as Markdown, which is readable as text, too."""
    head = "| model | where | runs | median | p95 | in range | bytes | memory | order (tau) | choice |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for (model, place), group in itertools.groupby(sorted(found, key=lambda c: c.key), lambda c: c.key[:2]):
        lines.append(_line(model, place, errors_of(list(group))))
    lines.append(_line("**all**", "", errors_of(found)))
    return lines


def detail_of(found: Iterable[Checked]) -> list[str]:
    """A line for each run."""
    lines = [
        "| model | where | strategy | predicted | measured | error | missed most |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda c: c.key):
        lines.append(
            f"| {one.model} | {one.place} | {one.strategy} | {one.predicted_ms:.3g} ms ({one.low_ms:.3g} to "
            f"{one.high_ms:.3g}) | {one.measured_ms:.3g} ms | {one.error:+.0%} | {one.worst_term} |"
        )
    return lines


def _line(model: str, place: str, errors: Errors) -> str:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"

    tau = "" if errors.tau is None else f"{errors.tau:.2f}"
    cells = (
        model, place, str(errors.count), percent(errors.median), percent(errors.p95), f"{errors.in_range:.0%}",
        percent(errors.bytes), percent(errors.memory), tau, "" if errors.chosen is None else f"{errors.chosen:.0%}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def merged(earlier: Iterable[Checked], new: Iterable[Checked]) -> list[Checked]:
    """Earlier results, those measured again replaced."""
    found = {one.key: one for one in earlier}
    found |= {one.key: one for one in new}
    return list(found.values())


def as_data(found: Iterable[Checked]) -> list[dict[str, object]]:
    return [asdict(one) for one in found]
