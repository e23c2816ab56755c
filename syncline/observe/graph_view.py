"""`GraphView`: what the user sees of a run of a vertex program: how much is left to change, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.observe.observer import Observer
from syncline.telemetry.events import Event, MetricsLogged


class GraphView:
    """Calls `progress` with the numbers of a round, some times a second; all other events go to `others`."""

    def __init__(self, others: Observer, progress: Callable[[dict[str, Any]], None] | None) -> None:
        self._others, self._progress = others, progress

    def on_event(self, event: Event) -> None:
        if not isinstance(event, MetricsLogged):
            self._others.on_event(event)
        elif self._progress is not None:
            whole = {name: int(event.metrics.get(name, 0)) for name in ("rounds", "updates", "edge_updates")}
            self._progress({**whole, "pending": event.metrics.get("pending", 0.0)})

    def close(self) -> None:
        self._others.close()
