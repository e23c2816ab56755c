"""The report of a bench: on the terminal, in `bench.md` and in `bench.json`.

Here: `Report` and its forms, pure. Not here: measuring (`harness.py`), the page `bench.html` (`html.py`), writing files
(`command.py`). Ratios are computed within a round, before taking the median over the rounds; the range beside a median
is the interquartile range.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from syncline.lab.bench.harness import GoalVerdict, SuiteResult
from syncline.lab.machine import BenchMachine
from syncline.lab.statistics import Spread, spread

_FORMAT = 1
_CLEAR_SHARE = 0.8
_COLUMNS = ("", "median", "IQR", "ratio to baseline")


@dataclass
class Report:
    """The results of one `syncline bench`."""

    machine: BenchMachine
    is_quick: bool
    started: float = field(default_factory=time.time)
    results: list[SuiteResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Suites that could not run."""
    is_interrupted: bool = False

    @property
    def failures(self) -> list[str]:
        """Every failure, a sentence each."""
        failed = [
            f"{r.suite.name}: {name} failed{' twice and was skipped' * outcome.is_skipped}. {outcome.failures[-1]}"
            for r in self.results
            for name, outcome in r.outcomes.items()
            if outcome.failures
        ]
        return [*self.problems, *failed]


def as_dict(report: Report) -> dict[str, Any]:
    """As plain data, including every measurement."""
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
    for result in report.results:
        yield f"{result.suite.name}: {result.suite.measures}"
        yield describe_rounds(result)
        rows = [_COLUMNS, *_rows(result)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        for row in rows:
            yield ("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        yield from (describe_verdict(result, v) for v in result.verdicts())
        yield ""
    yield from report.failures
    yield from report.machine.describe()
    yield from caveats(report)


def as_rich(report: Report) -> Group:
    """The same for a color terminal."""
    parts: list[Table | Text] = []
    for result in report.results:
        parts.append(Text.assemble((result.suite.name, "bold"), f": {result.suite.measures}"))
        parts.append(Text(describe_rounds(result), "dim"))
        table = Table(box=None, padding=(0, 3, 0, 2), header_style="dim")
        for i, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in _rows(result):
            table.add_row(*map(Text, row))
        parts.append(table)
        for verdict in result.verdicts():
            parts.append(Text(describe_verdict(result, verdict), _color(verdict)))
        parts.append(Text())
    parts += [Text(line, "red") for line in report.failures]
    parts += [Text(line, "dim") for line in (*report.machine.describe(), *caveats(report))]
    return Group(*parts)


def as_markdown(report: Report) -> str:
    """The same as a Markdown page."""
    lines = [
        "# Syncline bench",
        "",
        time.strftime("Measured on %Y-%m-%d at %H:%M:%S UTC.", time.gmtime(report.started)),
        *report.machine.describe(),
        *caveats(report),
        "",
        "The contenders of a suite ran in turn, round after round, after one warm-up round. Ratios are computed "
        "within a round, then the median over the rounds is taken. Ranges are interquartile ranges (IQR). "
        "All measurements are in `bench.json`.",
    ]
    for result in report.results:
        lines += ["", f"## {result.suite.name}", "", result.suite.measures, describe_rounds(result), ""]
        lines += [_markdown_row(_COLUMNS), "|---|---:|---:|---:|", *(_markdown_row(row) for row in _rows(result)), ""]
        lines += [f"- **{c.name}**: {c.what}" for c in result.suite.contenders if c.what]
        lines += [f"\n{describe_verdict(result, v)}" for v in result.verdicts()]
    if report.failures:
        lines += ["", "## Failures", *(f"\n{_indented(f)}" for f in report.failures)]
    return "\n".join(lines) + "\n"


def describe_verdict(result: SuiteResult, verdict: GoalVerdict) -> str:
    """Whether the goal was met, and how clearly."""
    goal, ratio = verdict.goal, verdict.ratio
    against = goal.against or result.suite.baseline
    wanted = f"'{goal.contender}' {goal.bound} {goal.limit:.2f} times '{against}'"
    if ratio is None:
        return f"Goal not judged: {wanted}; no round measured both."
    clarity = f"{verdict.rounds_that_agree} of {ratio.count} rounds agree"
    if not is_clear(verdict):
        clarity += ", so this is uncertain"
    return (
        f"Goal {'met' if verdict.is_met else 'NOT met'}: {wanted}; measured {_ratio(ratio)}, "
        f"{_more_or_less(ratio.median)}; {clarity}."
    )


def is_clear(verdict: GoalVerdict) -> bool:
    """Whether nearly all rounds agree with the verdict."""
    return verdict.ratio is not None and verdict.rounds_that_agree >= _CLEAR_SHARE * verdict.ratio.count


def show(report: Report, console: Console) -> None:
    """In color on a terminal, otherwise as plain lines."""
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
        "missing": dict(suite.missing),
        "goals": [
            {
                "contender": v.goal.contender,
                "bound": v.goal.bound,
                "limit": v.goal.limit,
                "against": v.goal.against or suite.baseline,
                "is_met": v.is_met,
                "rounds_that_agree": v.rounds_that_agree,
                "text": describe_verdict(result, v),
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
                "1 (baseline)" if is_baseline and times else _ratio(ratio) if ratio else "-",
            )
        )
    return rows + [(name, "-", "-", reason) for name, reason in result.suite.missing.items()]


def describe_rounds(result: SuiteResult) -> str:
    """The number of rounds, or where they were interrupted."""
    done = max(len(o.values) for o in result.outcomes.values())
    if result.is_interrupted:
        return f"Interrupted in round {done} of {result.rounds}." if done else "Interrupted during warm-up."
    return f"{done} round{'s' * (done != 1)}."


def caveats(report: Report) -> list[str]:
    """Limitations of the figures, a sentence each."""
    found = []
    if report.is_quick:
        found.append("This was a quick bench: a first look, with too few rounds for a conclusion.")
    if report.is_interrupted:
        found.append("It was interrupted: these are the results so far.")
    return found


def _color(verdict: GoalVerdict) -> str:
    return {True: "green", False: "yellow", None: "dim"}[verdict.is_met]


def number(value: float) -> str:
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
