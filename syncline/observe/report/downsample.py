"""Downsampling for charts. Pure functions.

`thin` is Steinarsson's "largest triangle three buckets" (Downsampling Time Series for Visual Representation, 2013): of
each bucket the point stays that spans the largest triangle with the one kept before it and the mean of the next
bucket, so peaks survive. `rates` merges windows instead, because a rate over a short time is noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.observe.report.record import Window

_XY = tuple[float, float]


def thin(points: Sequence[_XY], most: int) -> list[_XY]:
    """At most `most` of the points (3 or more), in order, with the first and the last."""
    if len(points) <= most:
        return list(points)
    ends = [1 + (len(points) - 2) * i // (most - 2) for i in range(most - 1)]
    kept = [points[0]]
    for i in range(most - 2):
        following = points[ends[i + 1] : ends[i + 2]] if i + 2 < len(ends) else points[-1:]
        mean = (sum(x for x, _ in following) / len(following), sum(y for _, y in following) / len(following))
        kept.append(max(points[ends[i] : ends[i + 1]], key=lambda p: _area(kept[-1], p, mean)))
    kept.append(points[-1])
    return kept


def _area(a: _XY, b: _XY, c: _XY) -> float:
    return abs((a[0] - c[0]) * (b[1] - a[1]) - (a[0] - b[0]) * (c[1] - a[1]))


def rates(windows: Sequence[Window], each_s: float) -> list[_XY]:
    """(time, samples per second) of one worker, with its windows merged to at least `each_s` of work."""
    found: list[_XY] = []
    samples, seconds = 0, 0.0
    for window in windows:
        samples, seconds = samples + window.samples, seconds + window.seconds
        if seconds >= each_s:
            found.append((window.time_s, samples / seconds))
            samples, seconds = 0, 0.0
    if windows and seconds > (each_s / 2 if found else 0):
        found.append((windows[-1].time_s, samples / seconds))
    return found


def total_rates(workers: Sequence[Sequence[Window]], each_s: float) -> list[_XY]:
    """(time, samples per second) of all workers together, in spans of `each_s` on the run's clock.

    Spans without training are left out: evaluation, waiting.
    """
    spans: dict[int, dict[int, tuple[int, float]]] = {}
    for number, windows in enumerate(workers):
        for window in windows:
            span = spans.setdefault(int(window.time_s // each_s), {})
            samples, seconds = span.get(number, (0, 0.0))
            span[number] = (samples + window.samples, seconds + window.seconds)
    return [
        ((index + 0.5) * each_s, sum(samples / seconds for samples, seconds in span.values() if seconds > 0))
        for index, span in sorted(spans.items())
    ]
