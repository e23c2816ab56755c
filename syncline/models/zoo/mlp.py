"""The multilayer perceptron, linear layers with ReLU between them on the flattened input, and softmax regression.

The softmax is part of the loss, not of the model.
"""

from __future__ import annotations

import itertools
import math

from torch import nn

from syncline.errors import ConfigError


def build(input_shape: tuple[int, ...], classes: int, hidden: object) -> nn.Module:
    """Layers of the widths in `hidden`, a list or tuple from input to output, then one of width `classes`."""
    if not isinstance(hidden, tuple | list) or not all(type(width) is int and width >= 1 for width in hidden):
        raise ConfigError(
            f"The option hidden of the model 'mlp' is {hidden!r}, but the widths of the hidden layers must be "
            "integers of 1 or more, for example (256, 128), or () for none."
        )
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow, wide in itertools.pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def linear(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One weight for each pair of input value and class, and one bias for each class."""
    return build(input_shape, classes, hidden=())
