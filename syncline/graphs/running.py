"""`run`: a vertex program on a graph, from first values to result. Here: what one process needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from syncline import boundary
from syncline.errors import ConfigError
from syncline.graphs.colors import colors_for
from syncline.graphs.execution import Run
from syncline.graphs.graph import Graph
from syncline.graphs.part import Part
from syncline.graphs.program import Update, VertexProgram
from syncline.graphs.result import GraphResult

Progress = Callable[[dict[str, Any]], None]
"""Called after each round with `rounds`, `updates`, `edge_updates` and `pending`: how much may still change."""


class Alone:
    """The team of a run without other workers."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def wait(self) -> None:
        return

    def shared(self, name: str, first: np.ndarray) -> np.ndarray:
        del name
        return first

    def end_round(self, state: dict[str, np.ndarray], own: np.ndarray, counters: dict[str, Any]) -> None:
        del own
        if self._progress is not None:
            left = state["pending"] if np.isfinite(state["pending"]).all() else state["change"]
            self._progress({**counters, "pending": float(left.sum())})


@boundary.guarding()
def run(
    program: VertexProgram | Update,
    graph: Graph,
    *,
    until: float | None = None,
    workers: int = 1,
    schedule: str | None = None,
    consistency: str | None = None,
    initial: Any = None,
    max_rounds: int | None = None,
    colors: Any = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> GraphResult:
    """Run a vertex program on a graph until a round changes its values by no more than `until` in sum.

    Settings that are not given are the program's own. `colors` keeps vertices apart by a coloring of your own instead
    of one that is computed: one number for each vertex.
    """
    if workers != 1:
        raise ConfigError(
            f"workers is {workers!r}, but vertex programs run in one process as yet, vectorized over all vertices. "
            "Leave out workers.", code="one-worker", workers=workers,
        )  # fmt: skip
    if max_rounds is not None and max_rounds < 1:
        raise ConfigError.for_setting("max_rounds", max_rounds, "1 or more")
    declared = program if isinstance(program, VertexProgram) else VertexProgram(update=program)
    declared = declared.changed(until=until, schedule=schedule, consistency=consistency, initial=initial)
    if declared.is_sampling and max_rounds is None:
        raise ConfigError("A sampling program does not end by itself. Give max_rounds.", code="no-end")
    started = time.perf_counter()
    made = Run(
        declared,
        Part(graph),
        _colors(graph, declared.consistency, colors),
        first_state(declared, graph),
        Alone(progress),
        max_rounds,
        seed,
    )
    converged = made.to_end()
    counters = made.counters
    return GraphResult(
        graph=graph,
        values=made.state["value"],
        converged=converged,
        rounds=counters["rounds"],
        updates=counters["updates"],
        edge_updates=counters["edge_updates"],
        seconds=time.perf_counter() - started,
        workers=1,
        facts={},
    )


def first_state(program: VertexProgram, graph: Graph) -> dict[str, np.ndarray]:
    """The arrays of a run before its first round, in which all vertices are due."""
    initial = np.asarray(_made(program.initial, graph))
    if initial.ndim == 0:
        initial = np.full(graph.size, initial)
    if len(initial) != graph.size:
        raise ConfigError(
            f"initial has {len(initial):,} values for {graph.size:,} vertices.", code="field-length", field="initial"
        )
    if initial.dtype.kind == "f" and np.isnan(initial).any():
        raise ConfigError("initial has NaN.", code="nan-in-field", field="initial")
    state = {"value": np.array(initial), "pending": np.full(graph.size, np.inf), "change": np.zeros(graph.size)}
    for name, first in program.edges.items():
        values = np.asarray(_made(first, graph))
        state[f"edge.{name}"] = np.array(values) if values.ndim else np.full(graph.edge_count, values)
    return state


def _made(value: Any, graph: Graph) -> Any:
    return value(graph) if callable(value) else value


def _colors(graph: Graph, consistency: str, given: Any) -> np.ndarray:
    if given is None:
        return colors_for(graph, consistency)
    colors = np.asarray(given)
    if len(colors) != graph.size:
        raise ConfigError(f"colors has {len(colors):,} numbers for {graph.size:,} vertices.", code="field-length")
    clash = (colors[graph.sources] == colors[graph.targets]) & (graph.sources != graph.targets)
    if consistency != "vertex" and clash.any():
        edge = int(np.argmax(clash))
        raise ConfigError(
            f"colors gives the neighbors {graph.name(int(graph.sources[edge]))} and "
            f"{graph.name(int(graph.targets[edge]))} the same color.", code="improper-colors", edge=edge,
        )  # fmt: skip
    return colors
