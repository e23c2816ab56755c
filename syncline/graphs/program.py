"""`vertex_program`: how an update of vertices is declared. Not here: running it (`execution.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from syncline.errors import ConfigError, UnknownName

__all__ = ["VertexProgram", "vertex_program"]

SCHEDULES = ("sweep", "fifo", "priority", "chromatic")
CONSISTENCIES = ("vertex", "edge", "full")

Update = Callable[[Any], Any]
Aggregate = Callable[[np.ndarray], Any]


@dataclass(frozen=True, kw_only=True)
class VertexProgram:
    """An update of vertices, and how it is to be run. Calling it calls the update.

    Attributes:
        update: Takes vertices and returns their new values.
        consistency: Which vertices may be updated at the same time: any ("vertex"), none that are neighbors ("edge"),
            none that have a common neighbor ("full").
        schedule: Which vertices are updated next: all ("sweep"; "chromatic": color by color), those whose neighbors
            have changed ("fifo"), or of these the ones whose neighbors have changed most ("priority").
        initial: The first values: a number, an array with one row for each vertex, or a function of the graph.
        edges: Initial values of the edge fields that the program scatters: functions of the graph, or arrays.
        aggregates: Values computed from those of all vertices before each round, by name.
        until: Ends when a round changes the values by no more than this in sum.
        is_sampling: Whether it draws random values, so that a round without a change is not the end: `max_rounds` is.
        is_relative: Whether `until` is a share of the sum of all values.
        name: For people; by default that of the function.
    """

    update: Update
    consistency: str = "edge"
    schedule: str = "sweep"
    initial: Any = 0.0
    edges: Mapping[str, Any] = field(default_factory=dict)
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)
    until: float = 1e-6
    is_relative: bool = False
    is_sampling: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or getattr(self.update, "__name__", "program").strip("<>"))
        if self.consistency not in CONSISTENCIES:
            raise UnknownName.among("consistency", self.consistency, CONSISTENCIES)
        if self.schedule not in SCHEDULES:
            raise UnknownName.among("schedule", self.schedule, SCHEDULES)
        if self.schedule == "chromatic" and self.consistency == "vertex":
            raise ConfigError(
                "The schedule 'chromatic' updates no two neighbors at once, but consistency='vertex' allows it. Use "
                "consistency='edge', or schedule='sweep'.",
                code="schedule-and-consistency",
            )
        if not (isinstance(self.until, int | float) and 0 <= self.until < np.inf):
            raise ConfigError.for_setting("until", self.until, "0 or a positive number")

    def __call__(self, vertices: Any) -> Any:
        return self.update(vertices)

    def changed(self, **settings: Any) -> VertexProgram:
        """With these settings, except for those that are None."""
        return replace(self, **{name: value for name, value in settings.items() if value is not None})


def vertex_program(**settings: Any) -> Callable[[Update], VertexProgram]:
    """Declare a function of many vertices as a vertex program; the settings are those of `VertexProgram`.

    >>> @syncline.vertex_program(initial=lambda graph: numpy.arange(graph.size), until=0)
    ... def components(v):
    ...     return numpy.minimum(v.value, v.gather("in", lambda e: e.source.value, reduce="min"))
    >>> graph = syncline.Graph(edges=[(0, 1), (2, 3)], directed=False)
    >>> syncline.graph.run(components, graph).values.tolist()
    [0, 0, 2, 2]
    """

    def declare(update: Update) -> VertexProgram:
        return VertexProgram(update=update, **settings)

    return declare
