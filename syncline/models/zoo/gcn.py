"""Graph convolutional networks (GCN)."""

from __future__ import annotations

import torch
from torch import nn

from syncline.models.graph_networks.layers import Transform, check_sizes, in_precision, widths
from syncline.models.graph_networks.neighborhood import Neighborhood
from syncline.models.graph_networks.network import Features, GraphNetwork


class GraphConvolution(nn.Module):
    """H' = D^-1/2 (A + I) D^-1/2 H W + b, with the degrees D of A + I."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.transform, self.bias = Transform(inputs, outputs), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        z = self.transform(x, hood, is_local=is_local, dropout=dropout)
        return hood.add_up(z, "normalized") + self.bias


def build(
    input_shape: tuple[int, ...], classes: int, hidden: int, layers: int, dropout: float, double: bool
) -> nn.Module:
    """`layers` convolutions of width `hidden`, the last of width `classes`."""
    check_sizes("gcn", hidden=hidden, layers=layers, dropout=dropout)
    sizes = widths(input_shape[0], hidden, classes, layers)
    return in_precision(GraphNetwork([GraphConvolution(*pair) for pair in sizes], dropout=dropout), double=double)
