"""Numbers, metrics and messages as short strings, the same in every view.

Here: pure functions. Not here: colors and layout (`terminal/`, `report/`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from syncline.telemetry.events import FatalFailure

_ESCAPE = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]?")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_CONTROL_BUT_ESCAPE = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")
_WORD = re.compile(r"[a-z0-9]+")


def count(amount: int, thing: str) -> str:
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


def speed(samples_per_s: float) -> list[str]:
    """`["61,234 samples/s"]`; nothing for a script that takes no samples from Syncline."""
    return [f"{rate(samples_per_s)} samples/s"] if samples_per_s != 0 else []


def size(amount: int) -> str:
    value, unit = float(amount), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"


def peak_memory(by_worker: Mapping[int, int]) -> str | None:
    """`412 MB (worker 1, the largest)`; None if unknown."""
    if not by_worker:
        return None
    largest = max(by_worker, key=lambda worker: by_worker[worker])
    more = f" (worker {largest}, the largest)" if len(by_worker) > 1 else ""
    return f"{size(by_worker[largest])}{more}"


def number(value: float | None) -> str:
    """A loss or the like, with four significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e8 else f"{value:.4g}"


def accuracy(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage; less than 1 never reads as 100%."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{100 * value:.{digits}f}"
    while value < 1 and float(text) >= 100 and digits < 6:
        digits += 1
        text = f"{100 * value:.{digits}f}"
    return f"{text}%"


def is_accuracy(name: str) -> bool:
    """Whether the name suggests a fraction to show in percent."""
    words = _WORD.findall(name.lower())
    return "acc" in words or any("accuracy" in word for word in words)


def metric(name: str, value: float) -> str:
    """A metric's value; an accuracy in percent."""
    if is_accuracy(name):
        # Some loops log percentages; no fraction is above 1.
        return accuracy(value if not value > 1 else value / 100, digits=2)
    return number(value)


def metrics_in_order(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Accuracies first, then other results, then training metrics."""
    return sorted(metrics.items(), key=lambda m: (m[0].startswith("train/"), not is_accuracy(m[0])))


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """`test/accuracy 98.71%` and so on, the most important first."""
    return [f"{name} {metric(name, value)}" for name, value in metrics_in_order(metrics)]


def best_metric(names: Iterable[str]) -> str | None:
    """The most important metric: an accuracy, else anything but a loss, else a loss."""
    return min(names, key=lambda n: (not is_accuracy(n), "loss" in n.lower()), default=None)


def clean(text: str, *, keep_colors: bool = False) -> str:
    """A line as a terminal would show it, without control sequences and, by default, without colors."""

    def kept(escape: re.Match[str]) -> str:
        return escape[0] if keep_colors and _COLOR.fullmatch(escape[0]) else ""

    text = _ESCAPE.sub(kept, text.rstrip("\r\n"))
    text = text.rpartition("\r")[2]  # a progress bar overwrites its line; keep its last state
    return (_CONTROL_BUT_ESCAPE if keep_colors else _CONTROL).sub("", text)


def headline(message: str) -> str:
    """The most informative line: the exception of a traceback, else the first line."""
    lines = [line for line in message.splitlines() if line.strip()]
    if not lines:
        return "no message"
    if not lines[0].startswith("Traceback (most recent"):
        return clean(lines[0])
    # The message may span several lines; it begins at the margin after the last frame.
    last_frame = max((i for i, line in enumerate(lines) if line.lstrip().startswith("File ")), default=0)
    return clean(next((line for line in lines[last_frame + 1 :] if not line[0].isspace()), lines[-1]))


def cause_first(message: str, failures: Iterable[FatalFailure]) -> list[str]:
    """The lines for a run that ended with `message`, the first cause first."""
    first = next(iter(failures), None)
    if first is not None and first.message.strip() and first.message.strip() not in message:
        message = f"{first.message.strip()}\n\n{message}"
    return [clean(line) for line in message.strip().splitlines()]
