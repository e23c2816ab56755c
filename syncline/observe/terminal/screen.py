"""The live view's screen: pure functions from a `RunState` and a terminal size to colored lines that fit it.

Not here: when to draw (`live_view.py`) and the final panel (`result.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from rich.text import Text

from syncline.observe.formatting import accuracy, duration, metric, metrics_in_order, number, rate
from syncline.observe.state import RunState, WorkerState, WorkerStatus
from syncline.observe.terminal.curve import curve
from syncline.observe.terminal.highlights import Series, loss_series

PHASE_COLORS = {
    "data": "blue", "forward": "cyan", "compute": "cyan", "backward": "green", "exchange": "magenta",
    "waiting": "bright_black", "update": "yellow",
}  # fmt: skip
_MARKS: dict[WorkerStatus, tuple[str, str]] = {
    "starting": ("○", "dim"), "training": ("●", "green"), "finished": ("✓", "green"), "failed": ("✗", "bold red"),
}  # fmt: skip
_MOST_WORKERS = 8
_WIDE = 78
_GAP = 4
_LABEL = 7
_LOGARITHMIC_FROM = 8


def draw(state: RunState, *, width: int, height: int, spin: str = "") -> Text:
    """The screen, at most `width` by `height`; `spin` is the current spinner character."""
    width, height = max(width, 10), max(height, 2)
    top = [*flow(_header(state, spin), width, " · "), *_progress(state, width)]
    bottom = [*_phases(state, width), *_bottom(state, width)]
    if len(top) + len(bottom) + 5 > height:  # the curve and the workers matter more than the phases
        bottom = _bottom(state, width)
    middle = _middle(state, width, height - len(top) - len(bottom) - 2)
    blocks = [block for block in (top, middle, bottom) if block]
    if sum(map(len, blocks)) + len(blocks) - 1 > height:  # no room for blank lines; cut at the bottom
        lines = [line for block in blocks for line in block]
    else:
        lines = [line for i, block in enumerate(blocks) for line in ([Text(), *block] if i else block)]
    for line in lines[:height]:
        line.truncate(width)
    screen = Text("\n", no_wrap=True, overflow="crop", end="").join(lines[:height])
    screen.no_wrap, screen.overflow, screen.end = True, "crop", ""
    return screen


def flow(parts: Sequence[Text], width: int, separator: str) -> list[Text]:
    """Join the parts on as many lines as needed; a part longer than a line is cut."""
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
    lines = []
    for i in range(max(len(left), len(right))):
        line = left[i].copy() if i < len(left) else Text()
        if i < len(right):
            line.truncate(left_width, pad=True)
            line.append(" " * _GAP).append_text(right[i])
        lines.append(line)
    return lines


def plot(series: Series, width: int, height: int, color: str) -> list[Text]:
    """A curve with its name above."""
    values, label, name = scaled(series)
    lines = curve(values, width, height, label=label)
    return [name, *(colored_row(line, color) for line in lines)]


def scaled(series: Series) -> tuple[Sequence[float], Callable[[float], str], Text]:
    """The values to draw, the formatter of the axis, and the title.

    A loss that falls far is drawn on a logarithmic scale; otherwise all but the beginning is a flat line.
    """
    finite = [v for v in series.values if math.isfinite(v)]
    title = Text(series.name, "bold")
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if "loss" in series.name.lower() and 0 < low * _LOGARITHMIC_FROM <= high < 1e300:
        title.append("  logarithmic", "not bold dim")
        return [math.log(v) for v in finite], lambda v: number(math.exp(v)), title
    return series.values, partial(metric, series.name), title


def colored_row(line: str, color: str) -> Text:
    """A line of a curve: labels dim, the plot in `color`."""
    axis = max(line.find("┤"), line.find("│")) + 1
    return Text.assemble((line[:axis], "dim"), (line[axis:], color))


def _header(state: RunState, spin: str) -> list[Text]:
    title, *rest = state.title
    head = Text.assemble((f"{spin} " if spin else "", "cyan"), (title, "bold"))
    if state.is_starting:
        rest.append("starting")
    return [head, *(Text(part) for part in rest)]


def _progress(state: RunState, width: int) -> list[Text]:
    """The progress bar; what does not fit beside it goes below, with the metrics."""
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
        step = Text.assemble("step ", (f"{state.step:,}", "bold"), most)
        below.insert(0, step if state.has_steps else Text("the script trains with torch.distributed itself"))
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
    """The loss curve and the workers, side by side if there is room."""
    if room < 2:
        return []
    workers = list(state.workers.values())
    series = loss_series(state)
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
    """A heading and a line per worker, failed ones first; workers that do not fit are summed up."""
    if not workers or room < 2:
        return []
    shown_first = sorted(workers, key=lambda w: (w.status != "failed", w.worker_id))
    most = min(_MOST_WORKERS, room - 1)
    if len(workers) > most:
        most = max(min(_MOST_WORKERS, room - 2), 0)
    shown, rest = shown_first[:most], shown_first[most:]
    digits = max((len(str(w.worker_id)) for w in shown), default=1)
    fastest = max((w.samples_per_s for w in workers), default=0.0)
    heading = Text("workers", "bold")
    if fastest > 0:
        heading.append(f"{'samples/s':>{max(width - len(heading), 10)}}", "not bold dim")
    lines = [heading]
    for worker in shown:
        mark, style = _MARKS[worker.status]
        line = Text.assemble((mark, style), f" {worker.worker_id:>{digits}} ")
        if worker.status == "failed" or worker.samples_per_s <= 0:
            line.append(worker.status, style)
        else:
            speed = rate(worker.samples_per_s)
            room_for_bar = width - line.cell_len - max(len(speed), 9) - 1
            line.append(_heavy_line(worker.samples_per_s / fastest, max(room_for_bar, 0)).ljust(room_for_bar), "green")
            line.append(f"{speed:>{width - line.cell_len}}" if width > line.cell_len else speed)
        lines.append(line)
    if rest:
        more = Text(f"+{len(rest):,} more", "dim")
        speed = rate(sum(w.samples_per_s for w in rest if w.status != "failed"))
        if fastest > 0 and width > more.cell_len + len(speed):
            more.append(f"{speed:>{width - more.cell_len}}")
        lines.append(more)
    return lines


def _phases(state: RunState, width: int) -> list[Text]:
    fractions, room = state.phase_fractions, width - _LABEL
    if not fractions:
        return []
    parts = [
        Text.assemble(("■ ", PHASE_COLORS.get(name, "white")), f"{name} {100 * part:.0f}%") for name, part in fractions
    ]
    return _labeled("time", [_phase_bar(fractions, min(room, 72)), *flow(parts, room, "  ")])


def _bottom(state: RunState, width: int) -> list[Text]:
    room = width - _LABEL
    lines: list[Text] = []
    if state.evaluations:
        last = state.evaluations[-1]
        texts = [*_metric_texts(last.metrics), Text(f"after epoch {last.epoch}", "dim")]
        lines += _labeled("test", flow(texts, room, "   "))
    if state.checkpoint is not None:
        age_s = state.checkpoint_age_s or 0.0
        age = f", {duration(age_s)} ago" if age_s >= 1 else ", just now"
        lines += _labeled("saved", flow([Text(f"step {state.checkpoint.step:,}{age}")], room, ""))
    if state.run_dir:
        lines += _labeled("run", flow([Text(state.run_dir)], room, ""))
    return lines


def _labeled(label: str, lines: Sequence[Text]) -> list[Text]:
    return [
        Text.assemble((f"{label if i == 0 else '':<{_LABEL}}", "dim"), line) for i, line in enumerate(lines)
    ]  # fmt: skip


def _phase_bar(parts: list[tuple[str, float]], width: int) -> Text:
    bar = Text()
    done, drawn = 0.0, 0
    for name, part in parts:
        done += part
        end = round(done * width)
        bar.append("━" * (end - drawn), PHASE_COLORS.get(name, "white"))
        drawn = end
    return bar


def _metric_texts(metrics: dict[str, float]) -> list[Text]:
    return [
        Text.assemble(f"{name.removeprefix('test/')} ", (metric(name, value), "bold"))
        for name, value in metrics_in_order(metrics)
    ]


def _loss_style(loss: float) -> str:
    return "bold" if math.isfinite(loss) else "bold red"
