"""Graph attention networks (GAT)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from syncline.compute.dropout_operators import drop_by_row
from syncline.errors import ConfigError
from syncline.models.graph_networks.layers import Transform, check_sizes, in_precision
from syncline.models.graph_networks.neighborhood import Neighborhood
from syncline.models.graph_networks.network import Features, GraphNetwork

_SLOPE = 0.2


class AttentionLayer(nn.Module):
    """h_i' = sum_j a_ij W h_j over the neighbors j of i, and i itself.

    a_ij is the softmax over j of LeakyReLU(s . W h_j + t . W h_i), for each of the heads; their results are
    concatenated, or in the last layer averaged.
    """

    def __init__(self, inputs: int, outputs: int, heads: int, *, averages: bool) -> None:
        super().__init__()
        self.heads, self.outputs, self.averages = heads, outputs, averages
        self.transform = Transform(inputs, outputs, copies=heads)
        self.source = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, outputs)))
        self.target = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, outputs)))
        self.bias = nn.Parameter(torch.zeros(outputs if averages else heads * outputs))

    def forward(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        if hood.sums_are_partial:
            raise ConfigError(
                "gat cannot be computed on a vertex cut: its weights are relative to all edges of a node, which are "
                "on several workers. Use --partition greedy, blocks, hash or metis.",
                code="partition", model="gat", nearest="greedy",
            )  # fmt: skip
        z = self.transform(x, hood, is_local=is_local, dropout=dropout)
        values = z.view(len(z), self.heads, self.outputs)
        sources, targets = hood.edges_with_loops
        to_target = (values[: hood.own] * self.target).sum(-1)
        scores = (values * self.source).sum(-1).index_select(0, sources) + to_target.index_select(0, targets)
        weights = _softmax(F.leaky_relu(scores, _SLOPE), targets, hood.own)
        if dropout:
            edges = hood.nodes[targets] * 2**31 + hood.nodes[sources]
            weights = drop_by_row(weights, edges, dropout)
        messages = values.index_select(0, sources) * weights.unsqueeze(-1)
        summed = values.new_zeros(hood.own, self.heads, self.outputs).index_add(0, targets, messages)
        heads = summed.mean(1) if self.averages else summed.flatten(1)
        biased: torch.Tensor = heads + self.bias
        return biased


def _softmax(scores: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    """Over the edges of each target."""
    index = targets.unsqueeze(-1).expand_as(scores)
    with torch.no_grad():
        largest = scores.new_full((count, scores.shape[1]), -torch.inf).scatter_reduce(0, index, scores, "amax")
    raised = (scores - largest.index_select(0, targets)).exp()
    total = scores.new_zeros(count, scores.shape[1]).index_add(0, targets, raised)
    return raised / total.index_select(0, targets)


def build(
    input_shape: tuple[int, ...], classes: int, hidden: int, layers: int, heads: int, dropout: float, double: bool
) -> nn.Module:
    """`layers` layers with `heads` heads of width `hidden` each; the last has one head of width `classes`."""
    check_sizes("gat", hidden=hidden, layers=layers, heads=heads, dropout=dropout)
    found: list[nn.Module] = []
    width = input_shape[0]
    for _ in range(layers - 1):
        found.append(AttentionLayer(width, hidden, heads, averages=False))
        width = hidden * heads
    found.append(AttentionLayer(width, classes, 1, averages=True))
    return in_precision(GraphNetwork(found, dropout=dropout, activation=nn.ELU()), double=double)
