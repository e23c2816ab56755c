"""What the layers of graph networks have in common: the linear map before values are exchanged, and their sizes."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from syncline.errors import ConfigError
from syncline.models.graph_networks.neighborhood import Neighborhood
from syncline.models.graph_networks.network import Features, GraphNetwork


class Transform(nn.Module):
    """A linear map without bias, of dense or sparse features; `copies` maps side by side.

    It comes before the sum over neighbors, so that what workers exchange is as wide as its output. The first layer
    exchanges nothing: each worker has the features of its halo.
    """

    def __init__(self, inputs: int, outputs: int, copies: int = 1) -> None:
        super().__init__()
        weights = [nn.init.xavier_uniform_(torch.empty(inputs, outputs)) for _ in range(copies)]
        self.weight = nn.Parameter(torch.cat(weights, dim=1))

    def forward(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        """The result for all local nodes; `is_local`: `x` has them all."""
        z = self.product(x, hood, is_local=is_local, dropout=dropout)
        return z if is_local else hood.fetch(z)

    def product(self, x: Features, hood: Neighborhood, *, is_local: bool, dropout: float) -> torch.Tensor:
        """The result for the nodes of `x`."""
        del is_local
        return x @ self.weight if isinstance(x, torch.Tensor) else x.product(self.weight, hood.nodes, dropout)


def own_rows(x: torch.Tensor, hood: Neighborhood) -> torch.Tensor:
    return x[: hood.own]


def widths(inputs: int, hidden: int, outputs: int, layers: int) -> list[tuple[int, int]]:
    """The widths of the input and output of each layer."""
    return list(itertools.pairwise([inputs, *[hidden] * (layers - 1), outputs]))


def check_sizes(model: str, *, dropout: float, neighbors: int = 0, **sizes: int) -> None:
    """`ConfigError` for an option that is out of range."""
    for name, value in {**sizes, "neighbors": neighbors}.items():
        least = 0 if name == "neighbors" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError.for_setting(
                f"the option {name} of the model {model!r}", value, f"an integer, {least} or more"
            )
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError.for_setting(f"the option dropout of the model {model!r}", dropout, "0 or more, less than 1")


def in_precision(network: GraphNetwork, *, double: bool) -> GraphNetwork:
    """In float64 if `double`: then rounding differs so little that no ReLU sees it, for any number of workers."""
    return network.double() if double else network
