"""The charts of a report: training and test metrics of the same name share one, for one run or several.

Here: grouping, choosing axes, and the HTML around each chart. Not here: how lines are drawn (`line_chart.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline.observe.formatting import count, is_accuracy, metric, rate
from syncline.observe.page.document import text
from syncline.observe.report.downsample import rates, total_rates
from syncline.observe.report.line_chart import Chart, Line, draw
from syncline.observe.report.record import Mark, Point, RunRecord

COLORS = 8
"""The size of the palette; further lines reuse its colors."""

_MOST_CURVES = 12
_MOST_LINES = 16
_RATE_SPANS = 80
_LEAST_SPAN_S = 0.5
_MOST_MARKS = 12
_ON_AXIS = ("failure", "change", "slow", "start", "end")


class Axis(NamedTuple):
    """An x-axis: steps, epochs or time."""

    key: str
    title: str

    def of(self, point: Point) -> float:
        if self.key == "epoch":
            assert point.epoch is not None, "offered only where all points have it"
            return point.epoch
        return point.step if self.key == "step" else point.time_s


_STEP, _EPOCH, _TIME = Axis("step", "step"), Axis("epoch", "epoch"), Axis("time", "time")


def axes_for(runs: Sequence[RunRecord]) -> list[Axis]:
    """The axes on which all curves of these runs can be drawn."""
    points = [p for run in runs for curve in run.curves.values() for p in curve]
    has_epochs = bool(points) and all(p.epoch is not None for p in points)
    return [_STEP, _EPOCH, _TIME] if has_epochs else [_STEP, _TIME]


def curves(runs: Sequence[RunRecord], axes: Sequence[Axis]) -> str:
    """A chart for each metric, losses first; the learning rate last."""
    names = sorted({_base(name) for run in runs for name, points in run.curves.items() if points}, key=_rank)
    figures = [_curve(runs, name, axes) for name in names[:_MOST_CURVES]]
    more = f"<p>{count(len(names) - _MOST_CURVES, 'metric')} more in events.jsonl and TensorBoard.</p>"
    return f'<div class="charts">{"".join(figures)}</div>{more if len(names) > _MOST_CURVES else ""}'


def throughput(runs: Sequence[RunRecord]) -> str:
    """Samples per second over time: per worker of one run, or the total of each of several runs."""
    if len(runs) == 1:
        run = runs[0]
        each_s = max(run.seconds / _RATE_SPANS, _LEAST_SPAN_S)
        lines = [
            Line(f"worker {worker_id}", rates(worker.windows, each_s), i % COLORS)
            for i, (worker_id, worker) in enumerate(sorted(run.workers.items())[:_MOST_LINES])
        ]
        marks = [(m.time_s, number, m.text) for number, m in axis_marks(run)]
    else:
        lines, marks = [], []
        for i, run in enumerate(runs):
            each_s = max(run.seconds / _RATE_SPANS, _LEAST_SPAN_S)
            points = total_rates([w.windows for w in run.workers.values()], each_s)
            lines.append(Line(run.name, points, i % COLORS))
    chart = Chart("time", lines, write=rate, starts_at_zero=True, marks=marks)
    caption = "samples per second, " + ("by worker" if len(runs) == 1 else "sum over workers")
    return _figure("throughput", caption, lines, draw(chart, "Samples per second"), wide=True)


def axis_marks(run: RunRecord) -> list[tuple[int, Mark]]:
    """The numbered marks on the time axis; warnings and notes are only in the timeline."""
    shown = [m for m in run.marks if m.kind in _ON_AXIS]
    return list(enumerate(shown, start=1)) if len(shown) <= _MOST_MARKS else []


def _base(name: str) -> str:
    """The metric without its split: `test/accuracy` and `train/accuracy` share a chart."""
    for prefix in ("train/", "test/"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _rank(name: str) -> tuple[bool, bool, bool, str]:
    return (name == "learning rate", "loss" not in name.lower(), not is_accuracy(name), name)


def _curve(runs: Sequence[RunRecord], base: str, axes: Sequence[Axis]) -> str:
    is_fraction = is_accuracy(base) and _are_fractions(runs, base)
    plots, lines = [], list[Line]()
    for axis in axes:
        lines = _lines(runs, base, axis)
        marks = [(m.time_s, n, m.text) for n, m in axis_marks(runs[0])] if axis is _TIME and len(runs) == 1 else ()
        chart = Chart(
            axis.title, lines, write=lambda v: metric(base, v), is_fraction=is_fraction, marks=marks,
            may_be_logarithmic="loss" in base.lower(),
        )  # fmt: skip
        plots.append(f'<div class="by by-{axis.key}">{draw(chart, base)}</div>')
    return _figure(base, base, lines, "".join(plots))


def _lines(runs: Sequence[RunRecord], base: str, axis: Axis) -> list[Line]:
    """Of one run, each split has a color; of several, each run."""
    lines = []
    for i, run in enumerate(runs):
        for j, name in enumerate((f"train/{base}", f"test/{base}", base)):
            if not run.curves.get(name):
                continue
            points = [(axis.of(p), p.value) for p in run.curves[name]]
            split = name.partition("/")[0] if name != base else base
            if len(runs) == 1:
                lines.append(Line(split, points, j % 2, "dots" if j == 1 else "line"))
            elif j == 0 and run.curves.get(f"test/{base}"):
                lines.append(Line(f"{run.name}, training", points, i % COLORS, "faint"))
            else:
                lines.append(Line(run.name, points, i % COLORS, "dots" if j == 1 else "line"))
    return lines


def _are_fractions(runs: Sequence[RunRecord], base: str) -> bool:
    names = (f"train/{base}", f"test/{base}", base)
    return all(0 <= p.value <= 1 for run in runs for name in names for p in run.curves.get(name, ()))


def _figure(key: str, caption: str, lines: Sequence[Line], drawn: str, *, wide: bool = False) -> str:
    keys = "".join(f'<span class="c{line.color} {line.kind}"><i></i>{text(line.label)}</span>' for line in lines)
    has_both = any(line.kind == "faint" for line in lines)
    how = '<span class="how">dots: test data; thin lines: training</span>' if has_both else ""
    legend = (f'<span class="keys">{keys}</span>' if len(lines) > 1 else "") + how
    return (
        f'<figure class="chart{" wide" * wide}" data-chart="{text(key)}"><figcaption><b>{text(caption)}</b>{legend}'
        f"</figcaption>{drawn}</figure>"
    )
