"""Computing on graphs: `syncline.graph.run` and the programs that come with Syncline.

Here: running a program on several workers, and by name `run` for one's own vertex programs, their result, and the
library; `node_data`, which makes a graph the data of a graph network. Not here: the graph and its parts (`graphs/`),
the programs of the library (`graphs/programs/`).

>>> graph = syncline.Graph(edges=[("a", "b"), ("c", "b")])
>>> syncline.graph.pagerank(graph).top(1)
[('b', 0.4680...)]
"""

from __future__ import annotations

import io
import sys

import numpy as np

from syncline.config.run import RunConfig
from syncline.driver import run_vertices
from syncline.graphs import running
from syncline.graphs.node_data import NodeData, node_data
from syncline.graphs.programs.als import als
from syncline.graphs.programs.belief_propagation import belief_propagation
from syncline.graphs.programs.coloring import coloring
from syncline.graphs.programs.components import components
from syncline.graphs.programs.gibbs import gibbs
from syncline.graphs.programs.k_core import k_core
from syncline.graphs.programs.label_propagation import label_propagation
from syncline.graphs.programs.longest_paths import longest_paths
from syncline.graphs.programs.pagerank import pagerank
from syncline.graphs.programs.shortest_paths import shortest_paths
from syncline.graphs.programs.triangles import triangles
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run
from syncline.graphs.work import OnWorkers
from syncline.observe.graph_view import GraphView
from syncline.observe.observer import WithoutEnd
from syncline.observe.terminal.quiet import Quiet

__all__ = [
    "GraphResult", "NodeData", "als", "belief_propagation", "coloring", "components", "gibbs", "k_core",
    "label_propagation", "longest_paths", "node_data", "pagerank", "run", "shortest_paths", "triangles",
]  # fmt: skip


def _launch(wanted: OnWorkers) -> GraphResult:
    """Run a vertex program on workers: a run like any other, whose result is the state that it saves last."""
    work = wanted.work
    config = RunConfig(**{"workers": wanted.workers, "device": "cpu", "tune": "off", **wanted.settings})
    view = GraphView(WithoutEnd(Quiet(io.StringIO(), sys.stderr)), wanted.progress)
    found = run_vertices(work, f"{work.graph.size}-vertices", config, view)
    numbers = found.metrics
    return GraphResult(
        graph=work.graph,
        values=np.asarray(found.model["value"]),  # type: ignore[index]  # the state by name
        converged=bool(numbers["converged"]),
        rounds=int(numbers["rounds"]),
        updates=int(numbers["updates"]),
        edge_updates=int(numbers["edge_updates"]),
        seconds=found.seconds,
        workers=wanted.workers,
        facts={
            "run_dir": found.run_dir, "partition": work.partition, "cut_edges": int(numbers["cut_edges"]),
            "sent_bytes": int(numbers["sent_bytes"]),
        },
    )  # fmt: skip


running.launch = _launch
