"""`run`: a vertex program on a graph, from first values to result.

Here: what one process needs, and what is checked before workers start. Not here: starting them (`syncline/graph.py`).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from syncline import boundary
from syncline.errors import ConfigError, check_options
from syncline.graphs.asynchronous import check_asynchronous
from syncline.graphs.colors import colors_for
from syncline.graphs.cut import Reads
from syncline.graphs.execution import Run, check_aggregates
from syncline.graphs.graph import Graph
from syncline.graphs.part import Alone, Part, Progress
from syncline.graphs.partition import check_method
from syncline.graphs.program import Update, VertexProgram
from syncline.graphs.result import GraphResult
from syncline.graphs.work import Launch, OnWorkers, VertexWork

RUN_SETTINGS = (
    "engine", "out", "name", "shared", "resume", "wait", "threads", "collective", "shared_memory_limit_mb",
    "exchange_timeout_s", "on_worker_failure", "max_failures", "checkpoint_every_s", "checkpoint_every_steps",
    "keep_checkpoints",
)  # fmt: skip
"""What a run of a vertex program has in common with every other run."""

launch: Launch | None = None
"""Runs work on several workers. `syncline/graph.py` sets it: the driver imports what is here, not the reverse."""


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
    partition: str = "blocks",
    asynchronous: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> GraphResult:
    """Run a vertex program on a graph until a round changes its values by no more than `until` in sum.

    Settings that are not given are the program's own. `colors` keeps vertices apart by a coloring of your own instead
    of one that is computed: one number for each vertex.

    Several `workers` divide the graph by `partition`: "blocks", "hash", "greedy", "metis", "vertex-cut" or
    "vertex-hash". They do the same rounds as one, together, or with `asynchronous` each its own without waiting for the
    others. `settings` are those of a run, such as out, name, resume, engine and on_worker_failure.
    """
    check_options("syncline.graph.run", settings, RUN_SETTINGS, kind="setting")
    if max_rounds is not None and max_rounds < 1:
        raise ConfigError.for_setting("max_rounds", max_rounds, "1 or more")
    declared = program if isinstance(program, VertexProgram) else VertexProgram(update=program)
    declared = declared.changed(until=until, schedule=schedule, consistency=consistency, initial=initial)
    if declared.is_sampling and max_rounds is None:
        raise ConfigError("A sampling program does not end by itself. Give max_rounds.", code="no-end")
    check_method(partition)
    colors = _colors(graph, declared.consistency, colors)
    if workers != 1 or settings:
        return _on_workers(
            declared, graph, colors, workers, partition, max_rounds, seed, asynchronous, settings, progress
        )
    started = time.perf_counter()
    made = Run(declared, Part(graph), colors, first_state(declared, graph), Alone(progress), max_rounds, seed)
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


def _on_workers(
    program: VertexProgram, graph: Graph, colors: np.ndarray, workers: int, partition: str, max_rounds: int | None,
    seed: int, asynchronous: bool, settings: dict[str, Any], progress: Progress | None,
) -> GraphResult:  # fmt: skip
    """Check what can be checked here, and start the workers."""
    check_aggregates(program)
    if asynchronous:
        check_asynchronous(program)
    if not 1 <= workers <= max(1, graph.size):
        raise ConfigError.for_setting("workers", workers, f"from 1 to {graph.size:,}, the vertices of the graph")
    assert launch is not None, "syncline.graph has been imported"
    state = first_state(program, graph)
    reads = Reads.of(program, graph, state, seed)
    _ = graph.into, graph.out_of  # sorted once for all workers
    work = VertexWork(
        name=program.name, program=program, graph=graph, colors=colors, reads=reads, partition=partition,
        max_rounds=max_rounds, seed=seed, asynchronous=asynchronous,
    )  # fmt: skip
    return launch(OnWorkers(work=work, workers=workers, settings=settings, progress=progress))


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
