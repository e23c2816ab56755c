"""Figures in words and tables: on the terminal, in `bench.md` and in `bench.json`.

Here: `Report` and its forms, pure. Not here: taking measurements (`harness.py`), the page `bench.html` (`html.py`),
writing files (`files.py`). Every ratio is formed inside a round before the median is taken; the range beside a median
is the middle half of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from syncline.bench.harness import SuiteResult, Verdict
from syncline.bench.machine import BenchMachine
from syncline.bench.statistics import Spread, spread

__all__ = [
    "Report", "as_dict", "as_lines", "as_markdown", "as_rich", "caveats", "is_beyond_doubt", "number",
    "rounds_in_words", "show", "verdict_in_words",
]  # fmt: skip

_FORMAT = 1
_BEYOND_DOUBT = 0.8
_COLUMNS = ("", "median", "middle half", "times the baseline")


@dataclass
class Report:
    """All that one `syncline bench` measured."""

    machine: BenchMachine
    is_quick: bool
    started: float = field(default_factory=time.time)
    results: list[SuiteResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Suites that could not be prepared."""
    is_interrupted: bool = False

    @property
    def failures(self) -> list[str]:
        """Everything that did not work, a sentence each."""
        failed = [
            f"{r.suite.name}: {name} failed{' and was left out' * outcome.is_out}. {outcome.failures[-1]}"
            for r in self.results
            for name, outcome in r.outcomes.items()
            if outcome.failures
        ]
        return [*self.problems, *failed]


def as_dict(report: Report) -> dict[str, Any]:
    """As plain data, every single measurement included."""
    return {
        "format": _FORMAT,
        "started": report.started,
        "is_quick": report.is_quick,
        "is_interrupted": report.is_interrupted,
        "machine": report.machine.to_dict(),
        "problems": report.problems,
        "suites": [_suite_as_dict(r) for r in report.results],
    }


def as_lines(report: Report) -> Iterator[str]:
    """As plain text."""
    for result in report.results:
        yield f"{result.suite.name}: {result.suite.measures}"
        yield rounds_in_words(result)
        rows = [_COLUMNS, *_rows(result)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        for row in rows:
            yield ("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        yield from (verdict_in_words(result, v) for v in result.verdicts())
        yield ""
    yield from report.failures
    yield from report.machine.in_words()
    yield from caveats(report)


def as_rich(report: Report) -> Group:
    """The same for a terminal."""
    parts: list[Table | Text] = []
    for result in report.results:
        parts.append(Text.assemble((result.suite.name, "bold"), f": {result.suite.measures}"))
        parts.append(Text(rounds_in_words(result), "dim"))
        table = Table(box=None, padding=(0, 3, 0, 2), header_style="dim")
        for i, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in _rows(result):
            table.add_row(*map(Text, row))
        parts.append(table)
        for verdict in result.verdicts():
            parts.append(Text(verdict_in_words(result, verdict), _colour(verdict)))
        parts.append(Text())
    parts += [Text(line, "red") for line in report.failures]
    parts += [Text(line, "dim") for line in (*report.machine.in_words(), *caveats(report))]
    return Group(*parts)


def as_markdown(report: Report) -> str:
    """The same as a page."""
    lines = [
        "# Syncline bench",
        "",
        time.strftime("Measured on %Y-%m-%d at %H:%M:%S UTC.", time.gmtime(report.started)),
        *report.machine.in_words(),
        *caveats(report),
        "",
        "The contenders of a suite ran in turn, round after round, after one round to warm up. A ratio is formed "
        "inside a round before the median over the rounds is taken. Ranges are the middle half of the rounds. "
        "All measurements are in `bench.json`.",
    ]
    for result in report.results:
        lines += ["", f"## {result.suite.name}", "", result.suite.measures, rounds_in_words(result), ""]
        lines += [_markdown_row(_COLUMNS), "|---|---:|---:|---:|", *(_markdown_row(row) for row in _rows(result)), ""]
        lines += [f"- **{c.name}**: {c.what}" for c in result.suite.contenders if c.what]
        lines += [f"\n{verdict_in_words(result, v)}" for v in result.verdicts()]
    if report.failures:
        lines += ["", "## What did not work", *(f"\n{_indented(f)}" for f in report.failures)]
    return "\n".join(lines) + "\n"


def verdict_in_words(result: SuiteResult, verdict: Verdict) -> str:
    """Whether a goal was met, and how clearly."""
    goal, ratio = verdict.goal, verdict.ratio
    against = goal.against or result.suite.baseline
    wanted = f"'{goal.contender}' was to be {goal.bound} {goal.limit:.2f} times '{against}'"
    if ratio is None:
        return f"Goal not judged: {wanted}, but no round has both."
    clarity = f"{verdict.rounds_that_agree} of {ratio.count} rounds say so"
    if not is_beyond_doubt(verdict):
        clarity += ", which leaves doubt"
    return (
        f"Goal {'met' if verdict.is_met else 'NOT met'}: {wanted}, and is {_ratio(ratio)}, "
        f"that is {_more_or_less(ratio.median)}; {clarity}."
    )


def is_beyond_doubt(verdict: Verdict) -> bool:
    """Whether nearly all rounds agree with the verdict."""
    return verdict.ratio is not None and verdict.rounds_that_agree >= _BEYOND_DOUBT * verdict.ratio.count


def show(report: Report, console: Console) -> None:
    """On a terminal that can show it, as a table with colours; else as plain lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(as_rich(report))
    else:
        for line in as_lines(report):
            console.out(line, highlight=False)


def _suite_as_dict(result: SuiteResult) -> dict[str, Any]:
    suite = result.suite
    return {
        "name": suite.name,
        "measures": suite.measures,
        "unit": suite.unit,
        "baseline": suite.baseline,
        "rounds": result.rounds,
        "is_interrupted": result.is_interrupted,
        "contenders": [
            {
                "name": c.name,
                "what": c.what,
                "values": result.outcomes[c.name].values,
                "failures": result.outcomes[c.name].failures,
                "spread": _spread_as_dict(result.spread(c.name)),
                "ratios": result.ratios(c.name),
                "ratio": _spread_as_dict(spread(result.ratios(c.name))),
            }
            for c in suite.contenders
        ],
        "goals": [
            {
                "contender": v.goal.contender,
                "bound": v.goal.bound,
                "limit": v.goal.limit,
                "against": v.goal.against or suite.baseline,
                "is_met": v.is_met,
                "rounds_that_agree": v.rounds_that_agree,
                "in_words": verdict_in_words(result, v),
            }
            for v in result.verdicts()
        ],
    }


def _spread_as_dict(found: Spread | None) -> dict[str, Any] | None:
    return asdict(found) if found else None


def _rows(result: SuiteResult) -> list[tuple[str, str, str, str]]:
    rows = []
    for contender in result.suite.contenders:
        times, ratio = result.spread(contender.name), spread(result.ratios(contender.name))
        failed = " (failed)" if result.outcomes[contender.name].failures else ""
        is_baseline = contender.name == result.suite.baseline
        rows.append(
            (
                contender.name + failed,
                f"{number(times.median)} {result.suite.unit}" if times else "-",
                f"{number(times.low)}–{number(times.high)}" if times else "-",
                "1 (the baseline)" if is_baseline and times else _ratio(ratio) if ratio else "-",
            )
        )
    return rows


def rounds_in_words(result: SuiteResult) -> str:
    """How many rounds there are, or how far they came."""
    done = max(len(o.values) for o in result.outcomes.values())
    if result.is_interrupted:
        return f"Interrupted in round {done} of {result.rounds}." if done else "Interrupted while warming up."
    return f"{done} round{'s' * (done != 1)}."


def caveats(report: Report) -> list[str]:
    """Why the figures are not the last word, a sentence each."""
    found = []
    if report.is_quick:
        found.append("This was a quick bench: a first look, too few rounds for a conclusion.")
    if report.is_interrupted:
        found.append("It was interrupted: this is what had been measured by then.")
    return found


def _colour(verdict: Verdict) -> str:
    return {True: "green", False: "yellow", None: "dim"}[verdict.is_met]


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


def _more_or_less(ratio: float) -> str:
    percent = 100 * abs(ratio - 1)
    return f"{percent:.1f}% {'more' if ratio >= 1 else 'less'}"


def _markdown_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _indented(text: str) -> str:
    first, *rest = text.splitlines()
    return "\n".join([first, *(f"    {line}" for line in rest)])
