"""The live view's final panel.

Here: the panel of a completed run, and that of a failed or stopped one. Not here: the screen during the run
(`screen.py`) and the same facts as plain lines (`plain.py`).
"""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from syncline.observe.formatting import (
    cause_first,
    count,
    duration,
    metric,
    metric_texts,
    metrics_in_order,
    number,
    peak_memory,
    speed,
)
from syncline.observe.state import RunState
from syncline.observe.terminal.curve import chart
from syncline.observe.terminal.highlights import Series, loss_series, next_steps, result_series
from syncline.observe.terminal.screen import beside, colored_row, flow, scaled
from syncline.telemetry.events import RunEnded, Summary

_MOST_WIDTH = 100
_CHART_HEIGHT = 6
_WIDE = 70
_GAP = 4
_LABEL = 7


def result_panel(state: RunState, summary: Summary, width: int) -> Panel:
    """Metrics, speed, curves, the run directory and suggested commands, at most `width` wide."""
    outer = min(width, _MOST_WIDTH)
    inner = max(outer - 4, 10)
    lines = [*_metric_lines(summary), Text(), *flow(_facts(state, summary), inner, " · ")]
    lines += [Text(line, "yellow", overflow="fold") for line in state.stragglers.summary(summary.time)]
    charts = _charts(state, inner)
    if charts:
        lines += [Text(), *charts]
    color = "yellow" if summary.stopped_early else "green"
    how = "stopped early" if summary.stopped_early else "done"
    title = Text.assemble((state.plan.title, "bold"), (f" {how}", f"bold {color}"))
    body = Group(*lines, Text(), _pointers(state, summary, inner))
    return Panel(body, title=title, title_align="left", border_style=color, width=outer, padding=(0, 1))


def failure_panel(state: RunState, ended: RunEnded, width: int) -> Panel:
    """Why the run ended, with the first cause first; also the progress if the user stopped it."""
    is_by_user = ended.reason in ("stopped", "killed", "interrupted")
    color = "yellow" if is_by_user else "red"
    outer = min(width, _MOST_WIDTH)
    inner = max(outer - 4, 10)
    body: list[Text] = []
    if is_by_user and state.step:
        total = f" of {state.plan.total_steps:,}" if state.fraction is not None else ""
        results = metric_texts(state.metrics) or ([f"loss {number(state.loss)}"] if state.loss is not None else [])
        body += [*flow([Text(f"step {state.step:,}{total}"), *map(Text, results)], inner, " · "), Text()]
        charts = _charts(state, inner)
        body += [*charts, Text()] if charts else []
    lines = cause_first(ended.message, state.failures) or [ended.reason]
    body += [Text(line, color, overflow="fold") for line in lines]
    title = Text.assemble((state.plan.title, "bold"), (f" {ended.reason or 'ended'}", f"bold {color}"))
    return Panel(Group(*body), title=title, title_align="left", border_style=color, width=outer, padding=(0, 1))


def _metric_lines(summary: Summary) -> list[Text]:
    metrics = metrics_in_order(summary.metrics)
    if not metrics and not summary.has_steps:
        return [Text("The script trained with torch.distributed itself.", "dim")]
    if not metrics:
        return [Text("No metrics were logged.", "dim")]
    longest = max(len(name) for name, _ in metrics)
    return [
        Text.assemble(f"{name:<{longest}}  ", (metric(name, value), "bold green" if i == 0 else "bold"))
        for i, (name, value) in enumerate(metrics)
    ]


def _facts(state: RunState, summary: Summary) -> list[Text]:
    epochs = [] if state.plan.is_own_loop else [f"{summary.epochs:.4g} epoch{'s' * (summary.epochs != 1)}"]
    facts = [*epochs, f"{summary.steps:,} steps", duration(summary.seconds), *speed(summary.samples_per_s)]
    if not summary.has_steps:
        facts = [duration(summary.seconds)]
    facts.append(count(summary.workers, "worker"))
    memory = peak_memory(summary.peak_memory_bytes)
    if memory is not None:
        facts.append(f"peak memory {memory}")
    if state.warning_count:
        facts.append(count(state.warning_count, "warning"))
    return [Text(fact) for fact in facts]


def _charts(state: RunState, width: int) -> list[Text]:
    found = [(s, c) for s, c in ((loss_series(state), "cyan"), (result_series(state), "green")) if s is not None]
    if len(found) == 2 and width >= _WIDE:
        half = (width - _GAP) // 2
        left, right = (_chart(series, half, color) for series, color in found)
        return beside(left, right, half)
    lines: list[Text] = []
    for series, color in found:
        lines += [*([Text()] if lines else []), *_chart(series, width, color)]
    return lines


def _chart(series: Series, width: int, color: str) -> list[Text]:
    values, label, title = scaled(series)
    rows = chart(values, width, _CHART_HEIGHT, first=series.first, last=series.last, label=label)
    return [title, *(colored_row(row, color) for row in rows[:-2]), *(Text(row, "dim") for row in rows[-2:])]


def _pointers(state: RunState, summary: Summary, width: int) -> Table:
    """The run directory and suggested commands, each with its purpose beside it if it fits."""
    steps = next_steps(state)
    longest = max((len(what) for what, _ in steps), default=0)
    is_roomy = all(_LABEL + longest + 2 + len(why) <= width for _, why in steps)
    table = Table.grid()
    table.add_column(width=_LABEL, style="dim")
    table.add_column(overflow="fold")
    table.add_row("run", Text(summary.run_dir))
    for i, (what, why) in enumerate(steps):
        fits = _LABEL + len(what) + 2 + len(why) <= width
        gap = " " * (longest - len(what) + 2) if is_roomy else "  " if fits else "\n"
        table.add_row("" if i else "next", Text.assemble((what, "bold"), (f"{gap}{why}", "dim")))
    return table
