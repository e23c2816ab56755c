"""`GraphNetwork`: a network whose inputs are the numbers of nodes, and that computes with their neighbors.

Here: which neighbors a forward pass computes with. In training these are the whole graph, this worker's part of it
(`divide`), or some drawn for each node (`sampling.py`); in evaluation always the whole graph, once for all nodes. Not
here: the layers (`models/zoo/`, one file for each network), and the division (`workers/graph_division.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from syncline.comms.halo_exchange import HaloExchange
from syncline.compute.dropout_operators import drop_by_row
from syncline.errors import ConfigError
from syncline.graphs.graph import Graph
from syncline.graphs.halo import GraphPart
from syncline.graphs.node_data import NodeData
from syncline.models.graph_networks.neighborhood import Neighborhood
from syncline.models.graph_networks.sampling import draw_neighborhoods
from syncline.models.graph_networks.sparse import SparseRows

Features = torch.Tensor | SparseRows


class GraphLayer(Protocol):
    """A layer, called with features or values of nodes."""

    def __call__(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        """Values of the own nodes; `is_local`: `x` has all local nodes, otherwise the own ones."""


class GraphNetwork(nn.Module):
    """Layers with `activation` between them; the last gives an output for each class.

    `neighbors`: how many to draw for each node and layer in training; 0 means all.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, dropout: float, activation: nn.Module | None = None, neighbors: int = 0
    ) -> None:
        super().__init__()
        self.layers, self.dropout, self.neighbors = nn.ModuleList(layers), dropout, neighbors
        self.activation = activation or nn.ReLU()
        self._bound: _BoundGraph | None = None
        self._part: _BoundPart | None = None
        self._outputs: tuple[tuple[int, ...], torch.Tensor] | None = None

    def bind(self, data: NodeData) -> None:
        """Compute on this graph from now on."""
        self._bound, self._part, self._outputs = _BoundGraph(data, self._dtype), None, None

    def divide(self, part: GraphPart, exchange: HaloExchange, *, cuts_vertices: bool) -> None:
        """In training, compute only the nodes of this part; all workers that hold one call the network together."""
        self._part = _BoundPart(self._graph, part, exchange, cuts_vertices=cuts_vertices)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def graph(self) -> Graph:
        """The edges that it computes with."""
        return self._graph.edges

    def owns(self, nodes: torch.Tensor) -> torch.Tensor:
        """Which of these nodes are in this worker's part."""
        return torch.ones(len(nodes), dtype=torch.bool) if self._part is None else self._part.rows(nodes) >= 0

    def undivide(self) -> None:
        """Compute the whole graph in training again."""
        self._part = None

    def train(self, mode: bool = True) -> GraphNetwork:
        """As in torch. Outputs are computed anew: parameters may have changed."""
        self._outputs = None
        super().train(mode)
        return self

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        """The outputs of these nodes; in a divided graph they must be this worker's own."""
        if not self.training:
            return self._all_outputs().index_select(0, nodes)
        if self._part is not None:
            part = self._part
            part.exchange.begin_step()
            return self._compute(part.features, [part.hood] * len(self.layers)).index_select(0, part.rows(nodes))
        graph = self._graph
        if self.neighbors:
            hoods, rows = draw_neighborhoods(graph.edges, nodes.numpy(), self.neighbors, len(self.layers))
            hoods = [hood.to(graph.dtype) for hood in hoods]
            return self._compute(graph.features_of(hoods[0].nodes), hoods).index_select(0, rows)
        return self._compute(graph.features, [graph.hood] * len(self.layers)).index_select(0, nodes)

    def _compute(self, x: Features, hoods: Sequence[Neighborhood]) -> torch.Tensor:
        rate = self.dropout if self.training else 0.0
        is_first = True
        for layer, hood in zip(self.layers, hoods, strict=True):
            if not is_first:
                x = self.activation(x)
            if isinstance(x, torch.Tensor):
                nodes = hood.nodes if len(x) == len(hood.nodes) else hood.own_nodes
                x = drop_by_row(x, nodes, rate) if rate else x
            is_sampled = hood is not hoods[0]  # then each layer has values of all nodes that the next one reads
            x = layer(x, hood, is_local=is_first or is_sampled, dropout=rate)
            is_first = False
        assert isinstance(x, torch.Tensor), "a network has a layer"
        return x

    def _all_outputs(self) -> torch.Tensor:
        """Of all nodes, kept until a parameter changes."""
        versions = tuple(0 if p.is_inference() else p._version for p in self.parameters())
        if self._outputs is None or self._outputs[0] != versions or torch.is_grad_enabled():
            graph = self._graph
            self._outputs = versions, self._compute(graph.features, [graph.hood] * len(self.layers))
        outputs = self._outputs[1]
        if torch.is_grad_enabled():
            self._outputs = None
        return outputs

    @property
    def _graph(self) -> _BoundGraph:
        if self._bound is None:
            raise ConfigError(
                "This graph network has no graph to compute on. Call network.bind(syncline.graph.node_data(graph)) "
                "first; syncline.train does so with its data.",
                code="no-graph",
            )
        return self._bound

    def __getstate__(self) -> dict[str, Any]:
        """Without what a View has opened."""
        return {**self.__dict__, "_part": None, "_outputs": None}


class _BoundGraph:
    """The whole graph, as every worker has it in memory."""

    def __init__(self, data: NodeData, dtype: torch.dtype) -> None:
        self.edges, self.matrix, self.dtype = data.edges, data.features, dtype
        graph = data.edges
        everything = np.arange(graph.size)
        self.hood = Neighborhood(everything, graph.size, graph.sources, graph.targets, graph.in_degree).to(dtype)
        self.features = self.features_of(self.hood.nodes)

    def features_of(self, nodes: torch.Tensor) -> Features:
        rows = self.matrix[nodes.numpy()]
        if isinstance(rows, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(rows)).to(self.dtype)
        return SparseRows(rows, self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> _BoundGraph:
        return self  # nothing of it changes


class _BoundPart:
    """One worker's part of the graph, in a View."""

    def __init__(self, graph: _BoundGraph, part: GraphPart, exchange: HaloExchange, *, cuts_vertices: bool) -> None:
        self.exchange = exchange
        vertices = part.vertices
        self.features = graph.features_of(torch.from_numpy(vertices))
        self.hood = Neighborhood(
            vertices, len(part.own), part.sources, part.targets, graph.edges.in_degree[vertices], exchange,
            sums_are_partial=cuts_vertices,
        ).to(graph.dtype)  # fmt: skip
        self._row = torch.full((graph.edges.size,), -1, dtype=torch.int64)
        self._row[self.hood.own_nodes] = torch.arange(len(part.own))

    def rows(self, nodes: torch.Tensor) -> torch.Tensor:
        """The rows of these nodes among the own ones; -1 for those of other parts."""
        return self._row.index_select(0, nodes)
