"""Numbers, metrics and messages in words, the same in every view.

Here: pure functions from values to short strings. Not here: colours and layout (`screen.py`, `plain.py`).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping

from syncline.telemetry.events import Summary, WorkerFailure

__all__ = [
    "accuracy", "best_metric", "cause_first", "clean", "count", "duration", "headline", "is_accuracy",
    "metric", "metric_words", "metrics_in_order", "next_steps", "number", "peak_memory", "rate", "size",
]  # fmt: skip

_ESCAPE = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_CONTROL_BUT_ESCAPE = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")
_WORD = re.compile(r"[a-z0-9]+")


def count(amount: int, thing: str) -> str:
    """`1 worker`, `4 workers`."""
    return f"{amount} {thing}" if amount == 1 else f"{amount:,} {thing}s"


def duration(seconds: float) -> str:
    """`35 ms`, `0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "? s"
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def rate(per_second: float) -> str:
    """A number per second: `61,234`, `3.2`."""
    if not math.isfinite(per_second):
        return "?"
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def size(amount: int) -> str:
    """`1.7 MB`."""
    value, unit = float(amount), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"


def peak_memory(by_worker: Mapping[int, int]) -> str | None:
    """`412 MB per worker (the largest, worker 1)`; None if nobody knows."""
    if not by_worker:
        return None
    largest = max(by_worker, key=lambda worker: by_worker[worker])
    more = f" per worker (the largest, worker {largest})" if len(by_worker) > 1 else ""
    return f"{size(by_worker[largest])}{more}"


def number(value: float | None) -> str:
    """A loss or the like, with four significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e8 else f"{value:.4g}"


def accuracy(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage. One that is not quite 100% never reads as 100%."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{100 * value:.{digits}f}"
    while value < 1 and float(text) >= 100 and digits < 6:
        digits += 1
        text = f"{100 * value:.{digits}f}"
    return f"{text}%"


def is_accuracy(name: str) -> bool:
    """Whether a metric of this name is a fraction that people think of in percent."""
    words = _WORD.findall(name.lower())
    return "acc" in words or any("accuracy" in word for word in words)


def metric(name: str, value: float) -> str:
    """A metric's value, as its name suggests."""
    if is_accuracy(name):
        # Some loops report percentages already; nothing else is an accuracy above 1.
        return accuracy(value if not value > 1 else value / 100, digits=2)
    return number(value)


def metrics_in_order(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """What people look for first comes first: accuracies, then other results, then those of training."""
    return sorted(metrics.items(), key=lambda m: (m[0].startswith("train/"), not is_accuracy(m[0])))


def metric_words(metrics: Mapping[str, float]) -> list[str]:
    """`test/accuracy 98.71%` and so on, what people look for first coming first."""
    return [f"{name} {metric(name, value)}" for name, value in metrics_in_order(metrics)]


def best_metric(names: Iterable[str]) -> str | None:
    """The one to draw if there is room for one: an accuracy, else anything but a loss, else that."""
    return min(names, key=lambda n: (not is_accuracy(n), "loss" in n.lower()), default=None)


def clean(text: str, *, keep_colours: bool = False) -> str:
    """A line as it would look on a terminal, without anything that could move its cursor, and without its colours."""

    def kept(escape: re.Match[str]) -> str:
        return escape[0] if keep_colours and _COLOUR.fullmatch(escape[0]) else ""

    text = _ESCAPE.sub(kept, text.rstrip("\r\n"))
    text = text.rpartition("\r")[2]  # a progress bar overwrites its line: its last state counts
    return (_CONTROL_BUT_ESCAPE if keep_colours else _CONTROL).sub("", text)


def headline(message: str) -> str:
    """The line of `message` that says most: of a traceback the exception, of anything else the first line."""
    lines = [line for line in message.splitlines() if line.strip()]
    if not lines:
        return "no message"
    if not lines[0].startswith("Traceback (most recent"):
        return clean(lines[0])
    # The message itself may have several lines, but it begins at the margin after the last frame.
    last_frame = max((i for i, line in enumerate(lines) if line.lstrip().startswith("File ")), default=0)
    return clean(next((line for line in lines[last_frame + 1 :] if not line[0].isspace()), lines[-1]))


def cause_first(message: str, failures: Iterable[WorkerFailure]) -> list[str]:
    """The lines to show for a run that ended with `message`: what failed first, then the rest."""
    first = next(iter(failures), None)
    if first is not None and first.message.strip() and first.message.strip() not in message:
        message = f"{first.message.strip()}\n\n{message}"
    return [clean(line) for line in message.strip().splitlines()]


def next_steps(summary: Summary, *, cores: int, can_train_on: bool, can_explain: bool) -> list[tuple[str, str]]:
    """What to do after the run, as (what to type or open, what for)."""
    run = shlex.quote(summary.run_dir)
    if summary.stopped_early:
        return [(f"syncline resume {run}", "goes on from here")]
    steps = []
    if can_train_on:
        steps.append((f"syncline resume {run} --epochs {2 * round(summary.epochs)}", "trains on"))
    if cores > summary.workers:
        steps.append((f"--workers {cores}", f"uses all {cores} cores of this machine"))
    elif can_explain:
        steps.append(("syncline explain TASK", "says what a run would do, without doing it"))
    steps.append((f"syncline report {run}", "draws it all on one page"))
    return steps
