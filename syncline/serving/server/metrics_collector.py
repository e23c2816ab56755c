"""`MetricsCollector`: the metrics of all processes, for the one that was asked for them.

Here: the supervisor's end, which never waits: a process that does not send its metrics in time is left out. Not here:
the metrics themselves (`metrics.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from syncline.serving.server.control import CollectMetrics, Lines, Message, Text
from syncline.serving.server.metrics import merged

__all__ = ["MetricsCollector"]

_COLLECT_S = 1.0


@dataclass
class _Scrape:
    """A request for metrics that waits for the processes."""

    asker: int
    number: int
    waiting: set[int]
    until_s: float
    lines: dict[int, list[str]] = field(default_factory=dict)


class MetricsCollector:
    """The requests for metrics that are under way. `send` delivers a message to a process."""

    def __init__(self, ready: Callable[[], Collection[int]], send: Callable[[int, Message], None]) -> None:
        self._ready, self._send = ready, send
        self._scrapes: list[_Scrape] = []

    def collect(self, asker: int, number: int) -> None:
        """Ask all processes that serve; `asker` gets the text under this number."""
        ready = set(self._ready())
        self._scrapes.append(_Scrape(asker, number, ready, time.monotonic() + _COLLECT_S))
        for process in ready:
            self._send(process, CollectMetrics(number))

    def on_lines(self, process: int, message: Lines) -> None:
        for scrape in self._scrapes:
            if scrape.number == message.number and process in scrape.waiting:
                scrape.waiting.discard(process)
                scrape.lines[process] = message.lines
                break
        self.answer()

    def on_gone(self, process: int) -> None:
        """A process has ended: its metrics are not waited for."""
        for scrape in self._scrapes:
            scrape.waiting.discard(process)

    def answer(self) -> None:
        """Answer the requests that are complete or have waited long enough."""
        now = time.monotonic()
        for scrape in [s for s in self._scrapes if not s.waiting or s.until_s < now]:
            self._scrapes.remove(scrape)
            self._send(scrape.asker, Text(scrape.number, merged(scrape.lines.values())))
