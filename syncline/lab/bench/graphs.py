"""PageRank on the graph of Debian's packages, beside an iteration with scipy by hand.

Here: CPU time to a change of 1e-9 in sum, in one process with one thread, the sparse matrix and the sorted edges made
beforehand; and how many edges each schedule reads. Before anything is measured, all ranks are checked to be equal to
those by hand to 1e-8. Not here: reading the graph, and graph networks (`graph_networks.py`).
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Generator

import numpy as np
from scipy.sparse import csr_matrix

from syncline.errors import SynclineError
from syncline.graphs.graph import Graph
from syncline.graphs.node_data import node_data
from syncline.graphs.programs.pagerank import pagerank
from syncline.graphs.reading import read_graph
from syncline.lab.bench import graph_networks
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite

_UNTIL = 1e-9
_DAMPING = 0.85
_MOST_DIFFERENCE = 1e-8
_GOAL_TIME, _GOAL_EDGES = 1.2, 0.5


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """The time, and the edges; then graph networks."""
    settings.say("Reading the graph of Debian's packages.")
    yield from suites_of(read_graph("debian"))
    yield from graph_networks.suites_of(node_data("cora"))


def suites_of(graph: Graph) -> Generator[Suite, None, None]:
    """Both suites for any graph."""
    by_hand = functools.partial(iterate, *transition(graph))
    expected = by_hand()
    for schedule in ("sweep", "priority"):
        difference = float(np.abs(pagerank(graph, until=_UNTIL, schedule=schedule).values - expected).sum())
        if difference > _MOST_DIFFERENCE:
            raise SynclineError(
                f"The ranks by {schedule} differ from those by hand by {difference:g} in sum.", code="wrong-ranks"
            )
    yield Suite(
        name="pagerank",
        measures=f"PageRank to a change of {_UNTIL:g} in sum: CPU seconds of one process.",
        unit="s",
        baseline="scipy by hand",
        contenders=(
            Contender(name="scipy by hand", measure=_seconds(by_hand), what="x = 0.85 (A x + dangling) + 0.15 / n."),
            Contender(
                name="sweep", measure=_seconds(lambda: pagerank(graph, until=_UNTIL, schedule="sweep")),
                what="syncline.graph.pagerank(graph)",
            ),
            Contender(
                name="priority", measure=_seconds(lambda: pagerank(graph, until=_UNTIL, schedule="priority")),
                what='syncline.graph.pagerank(graph, schedule="priority")',
            ),
        ),
        goals=(Goal(contender="sweep", limit=_GOAL_TIME),),
        rounds_per_repeat=2,
    )  # fmt: skip
    yield Suite(
        name="pagerank-edges",
        measures=f"PageRank to a change of {_UNTIL:g} in sum: edges read or written.",
        unit="edges",
        baseline="sweep",
        contenders=tuple(
            Contender(name=schedule, measure=functools.partial(_edges, graph, schedule), what=f'schedule="{schedule}"')
            for schedule in ("sweep", "fifo", "priority")
        ),
        goals=(Goal(contender="priority", limit=_GOAL_EDGES),),
    )


def transition(graph: Graph) -> tuple[csr_matrix, np.ndarray]:
    """The matrix of a random step, and which vertices have no edges out."""
    degree = np.bincount(graph.sources, minlength=graph.size)
    weights = 1.0 / degree[graph.sources]
    return csr_matrix((weights, (graph.targets, graph.sources)), shape=(graph.size, graph.size)), degree == 0


def iterate(matrix: csr_matrix, dangling: np.ndarray) -> np.ndarray:
    """The power iteration as one writes it."""
    size = len(dangling)
    ranks = np.full(size, 1 / size)
    while True:
        new = _DAMPING * (matrix @ ranks + ranks[dangling].sum() / size) + (1 - _DAMPING) / size
        if np.abs(new - ranks).sum() < _UNTIL:
            return np.asarray(new)
        ranks = new


def _seconds(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        gc.collect()
        start = time.process_time()
        call()
        return time.process_time() - start

    return measure


def _edges(graph: Graph, schedule: str) -> float:
    return float(pagerank(graph, until=_UNTIL, schedule=schedule).edge_updates)
