"""GoogLeNet (Szegedy et al., 2014): nine Inception modules, each of which looks at its input in four ways at once.

The modules have the channels of the paper's table 1. Differences: batch normalization after every convolution, as in
the paper that followed (Ioffe & Szegedy, 2015), in place of local response normalization, and for that reason no
auxiliary classifiers, which were to help the gradient through. The stem "imagenet" is the paper's, a 7x7 convolution of
stride 2 and two poolings, which would eat up a small image: the stem "cifar" has 3x3 with stride 1 and one pooling.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.models.zoo.options import check_choice, check_dropout, check_images

_SMALLEST_SIDE = 8  # one value is left after three poolings by 2
_STEMS = ("cifar", "imagenet")
_MODULES = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""For each module the channels of: 1x1; the 1x1 before 3x3, 3x3; the 1x1 before 5x5, 5x5; the 1x1 after pooling."""


def googlenet(input_shape: tuple[int, ...], classes: int, stem: object, dropout: object) -> nn.Sequential:
    """Three groups of modules with a pooling between them, averaged over the image and classified."""
    kind = check_choice("googlenet", "stem", stem, _STEMS)
    left_out = check_dropout("googlenet", dropout)
    check_images("googlenet", input_shape, _SMALLEST_SIDE)
    model = nn.Sequential()
    model.add_module("stem", _stem(kind, input_shape[0]))
    channels = 192
    for number, group in enumerate(_MODULES, start=1):
        modules = nn.Sequential() if number == 1 else nn.Sequential(nn.MaxPool2d(3, 2, padding=1))
        for widths in group:
            module = Inception(channels, *widths)
            modules.append(module)
            channels = module.channels_out
        model.add_module(f"inception{number}", modules)
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("dropout", nn.Dropout(left_out))
    model.add_module("classify", nn.Linear(channels, classes))
    return model


class Inception(nn.Module):
    """1x1, 3x3 and 5x5 convolutions and a pooling in parallel, concatenated."""

    def __init__(self, channels: int, one: int, before3: int, three: int, before5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one = _convolution(channels, one, 1)
        self.three = nn.Sequential(_convolution(channels, before3, 1), _convolution(before3, three, 3))
        self.five = nn.Sequential(_convolution(channels, before5, 1), _convolution(before5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _convolution(channels, pooled, 1))
        self.channels_out = one + three + five + pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The module's output for a batch of images, of the same height and width."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


def _stem(kind: str, channels: int) -> nn.Sequential:
    first: list[nn.Module] = [_convolution(channels, 64, 3)]
    if kind == "imagenet":
        first = [_convolution(channels, 64, 7, stride=2), nn.MaxPool2d(3, 2, padding=1)]
    return nn.Sequential(*first, _convolution(64, 64, 1), _convolution(64, 192, 3), nn.MaxPool2d(3, 2, padding=1))


def _convolution(channels_in: int, channels_out: int, side: int, stride: int = 1) -> nn.Sequential:
    """With batch normalization, which would cancel a bias, and ReLU."""
    layer = nn.Conv2d(channels_in, channels_out, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(channels_out), nn.ReLU())
