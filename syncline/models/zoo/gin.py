"""Graph isomorphism networks (GIN)."""

from __future__ import annotations

import torch
from torch import nn

from syncline.models.graph_networks.layers import Transform, check_sizes, in_precision, own_rows, widths
from syncline.models.graph_networks.neighborhood import Neighborhood
from syncline.models.graph_networks.network import Features, GraphNetwork


class GinLayer(nn.Module):
    """h_i' = MLP((1 + e) h_i + sum(h_j for neighbors j of i)), with two linear layers and ReLU between them.

    The first linear layer is applied before the sum, which is the same and moves fewer values.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.transform, self.bias = Transform(inputs, hidden), nn.Parameter(torch.zeros(hidden))
        self.epsilon = nn.Parameter(torch.zeros(()))
        self.second = nn.Linear(hidden, outputs)

    def forward(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        z = self.transform(x, hood, is_local=is_local, dropout=dropout)
        summed = (1 + self.epsilon) * own_rows(z, hood) + hood.add_up(z, "sum")
        second: torch.Tensor = self.second(torch.relu(summed + self.bias))
        return second


def build(
    input_shape: tuple[int, ...], classes: int, hidden: int, layers: int, dropout: float, double: bool
) -> nn.Module:
    """`layers` layers of width `hidden`, the last of width `classes`."""
    check_sizes("gin", hidden=hidden, layers=layers, dropout=dropout)
    sizes = widths(input_shape[0], hidden, classes, layers)
    return in_precision(
        GraphNetwork([GinLayer(low, hidden, high) for low, high in sizes], dropout=dropout), double=double
    )
