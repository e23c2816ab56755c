"""The deep autoencoder (Hinton & Salakhutdinov, 2006): through a narrow code, back to the input.

Linear layers of falling width lead to the code, and the same widths in reverse lead back. With its default widths it is
the paper's network for MNIST, 784-1000-500-250-30 and back. Differences: ReLU in place of logistic units, so that no
layer needs to be trained ahead of the others, and a linear output, because inputs need not lie between 0 and 1.
"""

from __future__ import annotations

import itertools
import math

from torch import nn

from syncline.models.zoo.options import check_widths


def build(input_shape: tuple[int, ...], classes: int, hidden: object) -> nn.Module:
    """Layers of the widths in `hidden`, the last of which is the code. The output has the shape of the input."""
    del classes  # there is nothing to classify
    widths = [
        math.prod(input_shape),
        *check_widths("autoencoder", hidden, "the widths from the first layer to the code"),
    ]
    encode = [nn.Flatten(), *_layers(widths)]
    decode = [*_layers(widths[::-1]), nn.Unflatten(1, input_shape)]
    return nn.Sequential(*encode, *decode)


def _layers(widths: list[int]) -> list[nn.Module]:
    """Linear layers with ReLU between them; the last one, which gives the code or the output, is linear."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]
