"""What one layer of a graph network computes with: nodes, their edges, and how values come to them.

Here: `Neighborhood`: of the whole graph, of one worker's part, or of sampled neighbors. Layers see no difference. Not
here: dividing a graph (`graphs/`), sampling (`sampling.py`), and the layers (`models/zoo/`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from syncline.comms.halo_exchange import HaloExchange
from syncline.models.graph_networks.sparse import SparseMatrix

Weighting = Literal["normalized", "mean", "sum"]


class Neighborhood:
    """Edges by local numbers: those of the nodes that are computed come first, then those that are only read."""

    def __init__(
        self,
        nodes: np.ndarray,
        own: int,
        sources: np.ndarray,
        targets: np.ndarray,
        degrees: np.ndarray,
        exchange: HaloExchange | None = None,
        *,
        sums_are_partial: bool = False,
    ) -> None:
        """`nodes` are the graph's numbers of the local ones, of which the first `own` are computed.

        `degrees` of the local nodes count all neighbors, also those that are not here. `sums_are_partial`: other
        workers have edges of the same nodes, as in a vertex cut.
        """
        self.nodes, self.own = torch.from_numpy(np.ascontiguousarray(nodes, np.int64)), own
        self.sums_are_partial = sums_are_partial
        self._sources, self._targets, self._degrees = sources, targets, degrees
        self._exchange = exchange
        self._matrices: dict[Weighting, SparseMatrix] = {}
        self._dtype = torch.float32

    @property
    def own_nodes(self) -> torch.Tensor:
        return self.nodes[: self.own]

    def fetch(self, own: torch.Tensor) -> torch.Tensor:
        """Values of all local nodes from those of the own ones."""
        return own if self._exchange is None else self._exchange.fetch(own)

    def to(self, dtype: torch.dtype) -> Neighborhood:
        """The same, for values of this type."""
        self._dtype = dtype
        return self

    def add_up(self, x: torch.Tensor, weighting: Weighting) -> torch.Tensor:
        """For each own node, the sum over its neighbors of `x`, which has a row for each local node.

        `normalized` is the sum of x_j / sqrt((1 + d_i) (1 + d_j)) over the neighbors j of i, and i itself.
        """
        summed = self._matrix(weighting) @ x
        return self._exchange.combine(summed) if self.sums_are_partial and self._exchange is not None else summed

    def _matrix(self, weighting: Weighting) -> SparseMatrix:
        if weighting not in self._matrices:
            self._matrices[weighting] = SparseMatrix(self._weighted(weighting), self._dtype)
        return self._matrices[weighting]

    def _weighted(self, weighting: Weighting) -> Any:
        from scipy.sparse import csr_matrix

        sources, targets, count = self._sources, self._targets, len(self.nodes)
        if weighting == "normalized":
            loops = np.arange(self.own)
            sources, targets = np.concatenate([sources, loops]), np.concatenate([targets, loops])
            scale = 1 / np.sqrt(self._degrees + 1.0)
            weights = scale[sources] * scale[targets]
        elif weighting == "mean":
            weights = 1 / np.maximum(self._degrees, 1.0)[targets]
        else:
            weights = np.ones(len(sources))
        # Sums in the order of the nodes, so that they have the same bits for any number of workers.
        order = np.lexsort((self.nodes.numpy()[sources], targets))
        rows = count if self.sums_are_partial else self.own
        offsets = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=rows))])
        return csr_matrix((weights[order], sources[order], offsets), shape=(rows, count))

    @cached_property
    def edges_with_loops(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sources and targets by local numbers, each own node also a neighbor of itself, by target and source."""
        loops = np.arange(self.own)
        sources, targets = np.concatenate([self._sources, loops]), np.concatenate([self._targets, loops])
        order = np.lexsort((self.nodes.numpy()[sources], targets))
        return torch.from_numpy(sources[order]), torch.from_numpy(targets[order])
