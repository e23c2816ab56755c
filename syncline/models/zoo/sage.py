"""GraphSAGE, with the mean of the neighbors."""

from __future__ import annotations

import torch
from torch import nn

from syncline.models.graph_networks.layers import Transform, check_sizes, in_precision, own_rows, widths
from syncline.models.graph_networks.neighborhood import Neighborhood
from syncline.models.graph_networks.network import Features, GraphNetwork


class SageLayer(nn.Module):
    """h_i' = W_1 h_i + W_2 mean(h_j for neighbors j of i) + b."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.transform, self.bias = Transform(inputs, outputs, copies=2), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        both = self.transform.product(x, hood, is_local=is_local, dropout=dropout)
        own, others = own_rows(both[:, : self.outputs], hood), both[:, self.outputs :].contiguous()
        z = others if is_local else hood.fetch(others)
        return own + hood.add_up(z, "mean") + self.bias


def build(
    input_shape: tuple[int, ...], classes: int, hidden: int, layers: int, dropout: float, neighbors: int, double: bool
) -> nn.Module:
    """`layers` layers of width `hidden`, the last of width `classes`; `neighbors` are drawn for each node, 0: all."""
    check_sizes("sage", hidden=hidden, layers=layers, dropout=dropout, neighbors=neighbors)
    sizes = widths(input_shape[0], hidden, classes, layers)
    return in_precision(
        GraphNetwork([SageLayer(*pair) for pair in sizes], dropout=dropout, neighbors=neighbors), double=double
    )
