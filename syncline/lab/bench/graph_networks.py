"""A step of GCN on Cora, beside the same network by hand.

Here: CPU time of forward, backward and update in one process with one thread, and the halos of each partitioner. Before
anything is measured, the outputs are checked to be equal to those by hand. Not here: reading the graph.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator

import numpy as np
import torch
from torch.nn import functional as F

from syncline.compute.dropout import Dropouts
from syncline.errors import SynclineError
from syncline.graphs.node_data import NodeData
from syncline.graphs.partition import METHODS, divide
from syncline.lab.bench.harness import Contender, Goal, Suite
from syncline.models.graph_networks.network import GraphNetwork
from syncline.models.zoo import registry as zoo

_STEPS, _MOST_DIFFERENCE = 10, 1e-4
_GOAL_TIME = 0.1
_DROPOUT = 0.5


def suites_of(data: NodeData) -> Generator[Suite, None, None]:
    """The time of a step, and the halos of each partitioner."""
    torch.manual_seed(0)
    network = zoo.build("gcn", (data.features.shape[1],), data.classes)
    assert isinstance(network, GraphNetwork), "a card for graphs builds one"
    network.bind(data)
    by_hand = _ByHand(network, data)
    with torch.no_grad():
        difference = float((network.eval()(torch.arange(data.edges.size)) - by_hand(is_training=False)).abs().max())
    network.train()
    if not difference < _MOST_DIFFERENCE:
        raise SynclineError(f"The outputs differ from those by hand by {difference:g}.", code="wrong-outputs")
    dropouts, nodes, step = Dropouts(0), torch.from_numpy(data.train), iter(range(2**31))

    def ours() -> torch.Tensor:
        with dropouts.of(next(step), data.train):
            outputs: torch.Tensor = network(nodes)
        return outputs

    parameters = list(network.parameters())
    targets = torch.from_numpy(data.labels)[nodes]
    yield Suite(
        name="gcn-step",
        measures="GCN (16 hidden, dropout) on the whole graph: CPU seconds of a step, in one process.",
        unit="s",
        baseline="edges by hand",
        contenders=(
            Contender(
                name="edges by hand", measure=_seconds(lambda: by_hand(is_training=True)[nodes], targets, parameters),
                what="Dense features, a message for each edge, index_add: how PyTorch Geometric computes by default.",
            ),
            Contender(
                name="syncline", measure=_seconds(ours, targets, parameters),
                what="syncline train gcn: sparse features, torch's products of sparse matrices.",
            ),
        ),
        goals=(Goal(contender="syncline", limit=_GOAL_TIME),),
    )  # fmt: skip
    methods = [method for method in METHODS if method != "metis"]
    yield Suite(
        name="halos",
        measures="The graph in two parts: rows that parts read of each other in each direction.",
        unit="rows",
        baseline="hash",
        contenders=tuple(
            Contender(name=method, measure=_rows(data, method), what=f"--partition {method}") for method in methods
        ),
    )


class _ByHand:
    """The same network with the same parameters, written with dense features and edge by edge."""

    def __init__(self, network: GraphNetwork, data: NodeData) -> None:
        self._parameters = list(network.parameters())
        dense = data.features if isinstance(data.features, np.ndarray) else data.features.toarray()
        self._x = torch.from_numpy(np.ascontiguousarray(dense, np.float32))
        loops = np.arange(data.edges.size)
        self._sources = torch.from_numpy(np.concatenate([data.edges.sources, loops]))
        self._targets = torch.from_numpy(np.concatenate([data.edges.targets, loops]))
        scale = torch.from_numpy(1 / np.sqrt(data.edges.in_degree + 1.0)).float()
        self._weights = (scale[self._sources] * scale[self._targets]).unsqueeze(1)

    def __call__(self, *, is_training: bool) -> torch.Tensor:
        first_bias, first, second_bias, second = self._parameters
        x = F.dropout(self._x, _DROPOUT, is_training)
        hidden = torch.relu(self._propagate(x @ first) + first_bias)
        return self._propagate(F.dropout(hidden, _DROPOUT, is_training) @ second) + second_bias

    def _propagate(self, z: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(z).index_add(0, self._targets, z[self._sources] * self._weights)


def _seconds(
    outputs: Callable[[], torch.Tensor], targets: torch.Tensor, parameters: list[torch.nn.Parameter]
) -> Callable[[], float]:
    def measure() -> float:
        optimizer = torch.optim.Adam(parameters, lr=0.0, fused=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        gc.collect()
        start = time.process_time()
        for _ in range(_STEPS):
            optimizer.zero_grad()
            F.cross_entropy(outputs(), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.set_num_threads(threads)
        return (time.process_time() - start) / _STEPS

    return measure


def _rows(data: NodeData, method: str) -> Callable[[], float]:
    return lambda: float(divide(data.edges, 2, method).copies)
