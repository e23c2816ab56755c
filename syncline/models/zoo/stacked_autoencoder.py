"""The stacked autoencoder (Bengio, Lamblin, Popovici & Larochelle, 2006): trained greedily, layer by layer.

The network is that of `autoencoder`: linear layers of falling width to the code and back. Here its training proceeds in
stages. First the outermost pair of layers learns to give back the input through a single hidden layer; then the pair
inside it, while the one that is trained already stays as it is; and so on to the code. What is left of the run trains
all layers together.

In each stage the output is the input as it comes back through the layers so far. So every stage has the same loss,
`loss(model(x), x)`, and the errors of all stages can be compared; in the paper a layer gives back its own input.

The stage follows from how far the run is, and from nothing else, so that workers agree about it without asking, and a
resumed run continues in the same stage. `syncline.workers.stages` sets the model's progress and logs each stage's
error. Without it, the model is the whole network.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn
from torch.nn import functional

from syncline.models.zoo.options import check_fraction, check_widths


def build(input_shape: tuple[int, ...], classes: int, hidden: object, pretrain: object) -> nn.Module:
    """Layers of the widths in `hidden`, the last being the code; `pretrain` is the fraction of the run for stages."""
    del classes  # there is nothing to classify
    widths = check_widths("stacked-autoencoder", hidden, "the widths from the first layer to the code")
    part = check_fraction(
        "stacked-autoencoder", "pretrain", pretrain, "the part of the steps that trains layer by layer, 0 for none"
    )
    return StackedAutoencoder(input_shape, widths, part)


class StackedAutoencoder(nn.Module):
    """Pairs of layers, from the outermost to the code: `depth` of them are in use, the first `frozen` stay as they are.

    >>> model = StackedAutoencoder((8,), (6, 4), pretrain=0.8)
    >>> [model.stage_at(done) for done in (0.0, 0.39, 0.4, 0.79, 0.8)]
    ['layer1', 'layer1', 'layer2', 'layer2', 'whole']
    """

    def __init__(self, input_shape: tuple[int, ...], hidden: tuple[int, ...], pretrain: float) -> None:
        super().__init__()
        self.input_shape, self.pretrain = tuple(input_shape), pretrain
        widths = [math.prod(input_shape), *hidden]
        self.encoders = nn.ModuleList(nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(widths))
        self.decoders = nn.ModuleList(nn.Linear(narrow, wide) for wide, narrow in itertools.pairwise(widths))
        self.depth, self.frozen = len(hidden), 0

    def stage_at(self, done: float) -> str:
        """The name of the stage at this fraction of the run."""
        if done >= self.pretrain:
            return "whole"
        return f"layer{self._layer_at(done) + 1}"

    def enter_stage(self, done: float) -> None:
        """Set the stage for this fraction of the run."""
        if done >= self.pretrain:
            self.depth, self.frozen = len(self.encoders), 0
        else:
            self.frozen = self._layer_at(done)
            self.depth = self.frozen + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The reconstructed input, in the same shape."""
        pairs = [(self.encoders[n], self.decoders[n], n < self.frozen) for n in range(self.depth)]
        values = x.flatten(1)
        for number, (encoder, _, is_frozen) in enumerate(pairs, start=1):
            values = _linear(encoder, values, is_frozen)
            if number < len(self.encoders):  # the code itself is linear
                values = torch.relu(values)
        for number, (_, decoder, is_frozen) in reversed(list(enumerate(pairs))):
            values = _linear(decoder, values, is_frozen)
            if number:  # and so is the output
                values = torch.relu(values)
        return values.view(-1, *self.input_shape)  # len(x) would fix the batch of an exported model

    def _layer_at(self, done: float) -> int:
        return min(int(done / self.pretrain * len(self.encoders) + _ROUNDING), len(self.encoders) - 1)


_ROUNDING = 1e-9  # where a stage ends exactly with a step, 0.4 / 0.8 * 2 must not be a little less than 1


def _linear(layer: nn.Module, values: torch.Tensor, is_frozen: bool) -> torch.Tensor:
    assert isinstance(layer, nn.Linear), "all layers here are linear"
    if is_frozen:  # gradients pass through it, but it gets none
        return functional.linear(values, layer.weight.detach(), layer.bias.detach())
    return functional.linear(values, layer.weight, layer.bias)
