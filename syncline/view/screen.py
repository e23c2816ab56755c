"""The live view's picture: from a `RunState` and the size of a terminal to coloured lines.

Here: pure functions; every line fits the width, and all of them the height. Not here: when to draw (`live.py`) and what
is shown at the end (`result.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from rich.text import Text

from syncline.view.curve import curve
from syncline.view.state import RunState, Series, WorkerState, WorkerStatus
from syncline.view.words import accuracy, duration, metric, metrics_in_order, number, rate

__all__ = ["PHASE_COLOURS", "beside", "coloured_row", "draw", "flow", "plot", "scaled"]

PHASE_COLOURS = {
    "data": "blue", "forward": "cyan", "compute": "cyan", "backward": "green", "exchange": "magenta",
    "waiting": "bright_black", "update": "yellow",
}  # fmt: skip
_MARKS: dict[WorkerStatus, tuple[str, str]] = {
    "starting": ("○", "dim"), "training": ("●", "green"), "finished": ("✓", "green"), "lost": ("✗", "bold red"),
}  # fmt: skip
_MOST_WORKERS = 8
_WIDE = 78
_GAP = 4
_LABEL = 7
_LOGARITHMIC_FROM = 8


def draw(state: RunState, *, width: int, height: int, spin: str = "") -> Text:
    """The picture, at most `width` by `height`. `spin` is a character that changes while something is going on."""
    width, height = max(width, 10), max(height, 2)
    top = [*flow(_header(state, spin), width, " · "), *_progress(state, width)]
    bottom = [*_phases(state, width), *_bottom(state, width)]
    if len(top) + len(bottom) + 5 > height:  # curve and workers say more than where the time goes
        bottom = _bottom(state, width)
    middle = _middle(state, width, height - len(top) - len(bottom) - 2)
    blocks = [block for block in (top, middle, bottom) if block]
    if sum(map(len, blocks)) + len(blocks) - 1 > height:  # no room for air, and then not for everything
        lines = [line for block in blocks for line in block]
    else:
        lines = [line for i, block in enumerate(blocks) for line in ([Text(), *block] if i else block)]
    for line in lines[:height]:
        line.truncate(width)
    picture = Text("\n", no_wrap=True, overflow="crop", end="").join(lines[:height])
    picture.no_wrap, picture.overflow, picture.end = True, "crop", ""
    return picture


def flow(parts: Sequence[Text], width: int, separator: str) -> list[Text]:
    """The parts one after the other, on as many lines as they need; a part that is too long alone is cut."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(separator) + part.cell_len <= width:
            lines[-1].append(separator, "dim").append_text(part)
        else:
            line = part.copy()
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
    return lines


def beside(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    """Two columns."""
    lines = []
    for i in range(max(len(left), len(right))):
        line = left[i].copy() if i < len(left) else Text()
        if i < len(right):
            line.truncate(left_width, pad=True)
            line.append(" " * _GAP).append_text(right[i])
        lines.append(line)
    return lines


def plot(series: Series, width: int, height: int, colour: str) -> list[Text]:
    """A series with its name above."""
    values, label, name = scaled(series)
    lines = curve(values, width, height, label=label)
    return [name, *(coloured_row(line, colour) for line in lines)]


def scaled(series: Series) -> tuple[Sequence[float], Callable[[float], str], Text]:
    """The values to draw, what they are called on the axis, and the title. A loss that falls far is shown by its
    logarithm: otherwise all but the beginning is a flat line.
    """
    finite = [v for v in series.values if math.isfinite(v)]
    title = Text(series.name, "bold")
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if "loss" in series.name.lower() and 0 < low * _LOGARITHMIC_FROM <= high < 1e300:
        title.append("  logarithmic", "not bold dim")
        return [math.log(v) for v in finite], lambda v: number(math.exp(v)), title
    return series.values, partial(metric, series.name), title


def coloured_row(line: str, colour: str) -> Text:
    """A line of a curve: the labels dim, what is right of the axis in `colour`."""
    axis = max(line.find("┤"), line.find("│")) + 1
    return Text.assemble((line[:axis], "dim"), (line[axis:], colour))


def _header(state: RunState, spin: str) -> list[Text]:
    title, *rest = state.title
    head = Text.assemble((f"{spin} " if spin else "", "cyan"), (title, "bold"))
    if state.is_starting:
        rest.append("starting")
    return [head, *(Text(part) for part in rest)]


def _progress(state: RunState, width: int) -> list[Text]:
    """The bar with what fits beside it; what does not comes below, with the numbers."""
    plan, fraction, left = state.plan, state.fraction, state.left_s
    below: list[Text] = []
    if state.samples_per_s > 0:
        below.append(Text.assemble((rate(state.samples_per_s), "bold"), " samples/s"))
    if not plan.is_own_loop and state.loss is not None:
        below.append(Text.assemble("loss ", (number(state.loss), _loss_style(state.loss))))
    if state.accuracy is not None:
        below.append(Text.assemble("accuracy ", (accuracy(state.accuracy), "bold")))
    if state.lr is not None:
        below.append(Text(f"lr {state.lr:.4g}"))
    if fraction is None:
        most = f" of at most {plan.total_steps:,}" if plan.total_steps else ""
        below.insert(0, Text.assemble("step ", (f"{state.step:,}", "bold"), most))
        if plan.is_own_loop:
            below.extend(_metric_texts(state.logged))
        return flow(below, width, "   ")
    epoch = f"epoch {state.epoch}/{plan.epochs} " if state.epoch is not None else ""
    percent = f" {math.floor(100 * fraction):3d}%"
    beside_bar = ""
    extras = [] if left is None else [f"{duration(left)} left"]
    extras.append(f"step {state.step:,} of {plan.total_steps:,}")
    for extra in extras:
        if width - len(epoch) - len(percent) - len(beside_bar) - len(extra) - 3 >= 20:
            beside_bar += f"   {extra}"
        else:
            below.append(Text(extra))
    room = width - len(epoch) - len(percent) - len(beside_bar)
    bar = _bar(fraction, max(room, 1))
    return [Text.assemble((epoch, "bold"), bar, (percent, "bold"), beside_bar), *flow(below, width, "   ")]


def _bar(fraction: float, width: int) -> Text:
    full = _heavy_line(fraction, width)
    return Text.assemble((full, "green" if fraction >= 1 else "cyan"), ("─" * (width - len(full)), "bright_black"))


def _heavy_line(fraction: float, width: int) -> str:
    halves = min(max(int(fraction * width * 2), 0), width * 2)
    return "━" * (halves // 2) + ("╸" if halves % 2 else "")


def _middle(state: RunState, width: int, room: int) -> list[Text]:
    """The curve and the workers: side by side where there is room, else one above the other."""
    if room < 2:
        return []
    workers = list(state.workers.values())
    series = state.loss_series
    if series is None:
        return _workers(workers, min(width, 60), room)
    if width >= _WIDE:
        right_width = max(30, width * 2 // 5)
        left_width = width - _GAP - right_width
        right = _workers(workers, right_width, room)
        return beside(plot(series, left_width, min(max(len(right) - 1, 5), room - 1), "cyan"), right, left_width)
    below = _workers(workers, width, max(room - 5, min(room, 3)))
    left_over = min(room - len(below) - 1, 6)
    if left_over < 2:
        return below
    if left_over > 3:
        return [*plot(series, width, left_over - 1, "cyan"), Text(), *below]
    return [*plot(series, width, left_over, "cyan"), *below]


def _workers(workers: list[WorkerState], width: int, room: int) -> list[Text]:
    """A heading and a line for each worker, those that are lost first; what does not fit is summed up."""
    if not workers or room < 2:
        return []
    shown_first = sorted(workers, key=lambda w: (w.status != "lost", w.rank))
    most = min(_MOST_WORKERS, room - 1)
    if len(workers) > most:
        most = max(min(_MOST_WORKERS, room - 2), 0)
    shown, rest = shown_first[:most], shown_first[most:]
    digits = max((len(str(w.rank)) for w in shown), default=1)
    fastest = max((w.samples_per_s for w in workers), default=0.0)
    heading = Text("workers", "bold")
    if fastest > 0:
        heading.append(f"{'samples/s':>{max(width - len(heading), 10)}}", "not bold dim")
    lines = [heading]
    for worker in shown:
        mark, style = _MARKS[worker.status]
        line = Text.assemble((mark, style), f" {worker.rank:>{digits}} ")
        if worker.status == "lost" or worker.samples_per_s <= 0:
            line.append(worker.status, style)
        else:
            speed = rate(worker.samples_per_s)
            room_for_bar = width - line.cell_len - max(len(speed), 9) - 1
            line.append(_heavy_line(worker.samples_per_s / fastest, max(room_for_bar, 0)).ljust(room_for_bar), "green")
            line.append(f"{speed:>{width - line.cell_len}}" if width > line.cell_len else speed)
        lines.append(line)
    if rest:
        more = Text(f"+{len(rest):,} more", "dim")
        speed = rate(sum(w.samples_per_s for w in rest if w.status != "lost"))
        if fastest > 0 and width > more.cell_len + len(speed):
            more.append(f"{speed:>{width - more.cell_len}}")
        lines.append(more)
    return lines


def _phases(state: RunState, width: int) -> list[Text]:
    """Where the time goes."""
    fractions, room = state.phase_fractions, width - _LABEL
    if not fractions:
        return []
    parts = [
        Text.assemble(("■ ", PHASE_COLOURS.get(name, "white")), f"{name} {100 * part:.0f}%") for name, part in fractions
    ]
    return _labelled("time", [_phase_bar(fractions, min(room, 72)), *flow(parts, room, "  ")])


def _bottom(state: RunState, width: int) -> list[Text]:
    """Results, checkpoint, place."""
    room = width - _LABEL
    lines: list[Text] = []
    if state.evaluations:
        last = state.evaluations[-1]
        texts = [*_metric_texts(last.metrics), Text(f"after epoch {last.epoch}", "dim")]
        lines += _labelled("test", flow(texts, room, "   "))
    if state.checkpoint is not None:
        age_s = state.checkpoint_age_s or 0.0
        age = f", {duration(age_s)} ago" if age_s >= 1 else ", just now"
        lines += _labelled("saved", flow([Text(f"step {state.checkpoint.step:,}{age}")], room, ""))
    if state.run_dir:
        lines += _labelled("run", flow([Text(state.run_dir)], room, ""))
    return lines


def _labelled(label: str, lines: Sequence[Text]) -> list[Text]:
    return [
        Text.assemble((f"{label if i == 0 else '':<{_LABEL}}", "dim"), line) for i, line in enumerate(lines)
    ]  # fmt: skip


def _phase_bar(parts: list[tuple[str, float]], width: int) -> Text:
    bar = Text()
    done, drawn = 0.0, 0
    for name, part in parts:
        done += part
        end = round(done * width)
        bar.append("━" * (end - drawn), PHASE_COLOURS.get(name, "white"))
        drawn = end
    return bar


def _metric_texts(metrics: dict[str, float]) -> list[Text]:
    return [
        Text.assemble(f"{name.removeprefix('test/')} ", (metric(name, value), "bold"))
        for name, value in metrics_in_order(metrics)
    ]


def _loss_style(loss: float) -> str:
    return "bold" if math.isfinite(loss) else "bold red"
