"""Counters of one server process, and their text in the format of Prometheus.

Each process has its own series, with its number as a label: so a counter never falls, except when its process was
replaced, which Prometheus takes for what it is. Not here: collecting the text of all processes (`supervisor.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ServerMetrics", "merged"]

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_HELP = {
    "syncline_requests_total": ("counter", "Inference requests by their outcome."),
    "syncline_http_responses_total": ("counter", "HTTP responses by status."),
    "syncline_request_seconds": ("histogram", "Time from the last byte of an inference request to its response."),
    "syncline_refused_total": ("counter", "Requests refused because the server was busy."),
    "syncline_shadow_total": ("counter", "Answers of shadow versions, by whether they agree with the answer given."),
    "syncline_labels_total": ("counter", "Labels that came back, by whether the prediction was right."),
    "syncline_connections": ("gauge", "Open connections."),
    "syncline_requests_in_flight": ("gauge", "Inference requests that are queued or running."),
    "syncline_model_info": ("gauge", "Served versions; the value is 1."),
}


class ServerMetrics:
    """Counts what happens in one process."""

    def __init__(self, process: int = 0) -> None:
        self._process = process
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._statuses: Counter[int] = Counter()
        self._outcomes: Counter[tuple[str, str, bool]] = Counter()
        self._seconds: dict[str, tuple[list[int], list[float]]] = {}

    def count(self, name: str, **labels: str) -> None:
        self._counts[name, tuple(labels.items())] += 1

    def status(self, status: int) -> None:
        self._statuses[status] += 1

    def answered(self, model: str, version: str, seconds: float, *, is_error: bool) -> None:
        self._outcomes[model, version, is_error] += 1
        found = self._seconds.get(model)
        if found is None:
            found = self._seconds[model] = ([0] * (len(BUCKETS_S) + 1), [0.0])
        found[0][bisect_left(BUCKETS_S, seconds)] += 1
        found[1][0] += seconds

    def labeled(self, model: str, version: str, outcomes: Sequence[bool]) -> None:
        """Labels came back for these predictions: whether each was right."""
        for is_right in outcomes:
            self.count("syncline_labels_total", model=model, version=version, outcome="right" if is_right else "wrong")

    def lines(self, gauges: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]) -> list[str]:
        """One line for each series, with the present values of the gauges."""
        found = dict(self._counts)
        for status, count in self._statuses.items():
            found["syncline_http_responses_total", (("status", str(status)),)] = count
        for (model, version, is_error), count in self._outcomes.items():
            labels = (("model", model), ("version", version), ("outcome", "error" if is_error else "ok"))
            found["syncline_requests_total", labels] = count
        lines = [self._line(name, labels, value) for (name, labels), value in {**found, **gauges}.items()]
        for model, (buckets, total) in self._seconds.items():
            lines += self._histogram(model, buckets, total[0])
        return lines

    def _histogram(self, model: str, buckets: list[int], total: float) -> Iterable[str]:
        name, labels, below = "syncline_request_seconds", (("model", model),), 0
        for limit, count in zip([*map(str, BUCKETS_S), "+Inf"], buckets, strict=True):
            below += count
            yield self._line(f"{name}_bucket", (*labels, ("le", limit)), below)
        yield self._line(f"{name}_sum", labels, total)
        yield self._line(f"{name}_count", labels, below)

    def _line(self, name: str, labels: tuple[tuple[str, str], ...], value: float) -> str:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in (*labels, ("process", str(self._process))))
        return f"{name}{{{shown}}} {value:.9g}" if isinstance(value, float) else f"{name}{{{shown}}} {value}"


def merged(processes: Iterable[Iterable[str]]) -> str:
    """The text of all processes: the lines of a metric stand together, after its help."""
    by_name: dict[str, list[str]] = {name: [] for name in _HELP}
    for lines in processes:
        for line in lines:
            name = line.partition("{")[0]
            family = next((known for known in _HELP if name == known or name.startswith(f"{known}_")), name)
            by_name.setdefault(family, []).append(line)
    text: list[str] = []
    for name, lines in by_name.items():
        if lines:
            kind, what = _HELP[name]
            text += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *lines]
    return "\n".join([*text, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
