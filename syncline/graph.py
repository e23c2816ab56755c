"""Computing on graphs: `syncline.graph.run` and the programs that come with Syncline.

Here: `run` for one's own vertex programs, their result, and the library by name; `node_data`, which makes a graph the
data of a graph network. Not here: the graph and its parts
(`graphs/`), the programs of the library (`graphs/programs/`).

>>> graph = syncline.Graph(edges=[("a", "b"), ("c", "b")])
>>> syncline.graph.pagerank(graph).top(1)
[('b', 0.4680...)]
"""

from __future__ import annotations

from syncline.graphs.node_data import NodeData, node_data
from syncline.graphs.programs.als import als
from syncline.graphs.programs.belief_propagation import belief_propagation
from syncline.graphs.programs.coloring import coloring
from syncline.graphs.programs.components import components
from syncline.graphs.programs.gibbs import gibbs
from syncline.graphs.programs.k_core import k_core
from syncline.graphs.programs.label_propagation import label_propagation
from syncline.graphs.programs.pagerank import pagerank
from syncline.graphs.programs.shortest_paths import shortest_paths
from syncline.graphs.programs.triangles import triangles
from syncline.graphs.result import GraphResult
from syncline.graphs.running import run

__all__ = [
    "GraphResult", "NodeData", "als", "belief_propagation", "coloring", "components", "gibbs", "k_core",
    "label_propagation", "node_data", "pagerank", "run", "shortest_paths", "triangles",
]  # fmt: skip
