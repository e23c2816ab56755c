"""What the clusters of each layer stand for, as images.

Here: `pictures_of`. A cluster of the lowest layer is a patch. One above is a belief about each of the nodes below, so
it looks like their clusters, in the middle of what it believes. Not here: the file (`telemetry/centroids.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.models.destin.network import DestinNetwork, Layer


def pictures_of(network: DestinNetwork) -> list[tuple[str, Tensor]]:
    """By layer: a title, and bytes [clusters, channels, height, width] of the node in the middle."""
    found = []
    for number, side in enumerate(network.geometry.sides):
        node = (side // 2) * side + side // 2
        images = _images_of(network, number, node)
        low, high = images.min(), images.max()
        scaled = (images - low) / (high - low).clamp(min=1e-9) * 255
        which = "all nodes" if network.settings.shared else f"node {node + 1} of {side * side}"
        found.append((f"Layer {number + 1}, {which}", scaled.round().to(torch.uint8)))
    return found


def _images_of(network: DestinNetwork, number: int, node: int) -> Tensor:
    geometry, layer = network.geometry, network.layers[number]
    assert isinstance(layer, Layer)
    means = layer.means[0 if network.settings.shared else node]
    channels, (height, width) = geometry.shape[0], geometry.patch
    if not number:
        return means[:, : channels * height * width].reshape(-1, channels, height, width)
    side, below = geometry.sides[number], network.settings.clusters[number - 1]
    ratio = geometry.sides[number - 1] // side
    beliefs = means[:, : ratio * ratio * below].reshape(-1, ratio, ratio, below)
    top, left = node // side * ratio, node % side * ratio
    rows = []
    for y in range(ratio):
        row = []
        for x in range(ratio):
            child = _images_of(network, number - 1, (top + y) * geometry.sides[number - 1] + left + x)
            weights = beliefs[:, y, x].clamp(min=0)
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
            row.append(torch.einsum("kb,bchw->kchw", weights, child))
        rows.append(torch.cat(row, 3))
    return torch.cat(rows, 2)
