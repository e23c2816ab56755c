"""ResNet-18, ResNet-34 and ResNet-50 (He, Zhang, Ren & Sun, 2015), for small images and for large ones.

The four stages of blocks are those of the paper's table 1: basic blocks in ResNet-18 and ResNet-34, bottlenecks in
ResNet-50. The stem "imagenet" is that table's: a 7x7 convolution of stride 2 and a max-pooling. The stem "cifar" is the
one of section 4.2: a 3x3 convolution of stride 1 and no pooling, for 32 x 32 pixels cannot be halved five times.
Shortcuts that change the shape are 1x1 convolutions (option B). A bottleneck that halves the image does so in its 3x3
convolution, as torchvision has it, and not in the 1x1 before, which would look at one pixel of four.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from syncline.models.zoo.options import check_choice, check_images, check_whole

_STEMS = ("cifar", "imagenet")


class _Block(nn.Module):
    """relu(F(x) + shortcut(x)); subclasses define F."""

    expansion = 1
    """Output channels as a multiple of the stage's width."""

    def __init__(self, residual: nn.Sequential, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                _convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for a batch of images."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class BasicBlock(_Block):
    """F is two 3x3 convolutions, each with batch normalization."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        residual = nn.Sequential(
            _convolution(channels_in, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _convolution(width, width, 3, 1),
            nn.BatchNorm2d(width),
        )
        super().__init__(residual, channels_in, width, stride)


class Bottleneck(_Block):
    """F is a 1x1, a 3x3 and a 1x1 convolution, each with batch normalization; the last one widens fourfold."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        channels_out = self.expansion * width
        residual = nn.Sequential(
            _convolution(channels_in, width, 1, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _convolution(width, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _convolution(width, channels_out, 1, 1),
            nn.BatchNorm2d(channels_out),
        )
        super().__init__(residual, channels_in, channels_out, stride)


def _resnet(
    name: str,
    block: type[BasicBlock] | type[Bottleneck],
    depths: tuple[int, ...],
    input_shape: tuple[int, ...],
    classes: int,
    width: object,
    stem: object,
) -> nn.Module:
    """Stages of `width`, 2, 4 and 8 times `width` channels, averaged over the image and classified.

    Convolutions are initialized as in He et al., Delving Deep into Rectifiers (2015), keeping the variance backward.
    """
    check_images(name, input_shape)
    channels = check_whole(name, "width", width, "the number of channels of the first stage; the paper has 64")
    model, first = nn.Sequential(), channels
    model.add_module("stem", _stem(check_choice(name, "stem", stem, _STEMS), input_shape[0], channels))
    for stage, depth in enumerate(depths):
        blocks = nn.Sequential()
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            blocks.append(block(channels, first * 2**stage, stride))
            channels = block.expansion * first * 2**stage
        model.add_module(f"stage{stage + 1}", blocks)
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classify", nn.Linear(channels, classes))
    return model


def _stem(kind: str, channels_in: int, channels: int) -> nn.Sequential:
    side, stride = (7, 2) if kind == "imagenet" else (3, 1)
    layers = nn.Sequential(_convolution(channels_in, channels, side, stride), nn.BatchNorm2d(channels), nn.ReLU())
    return layers.append(nn.MaxPool2d(3, 2, padding=1)) if kind == "imagenet" else layers


def _convolution(channels_in: int, channels_out: int, side: int, stride: int) -> nn.Conv2d:
    """Without bias, which the batch normalization that follows would cancel."""
    layer = nn.Conv2d(channels_in, channels_out, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


resnet18 = functools.partial(_resnet, "resnet18", BasicBlock, (2, 2, 2, 2))
resnet34 = functools.partial(_resnet, "resnet34", BasicBlock, (3, 4, 6, 3))
resnet50 = functools.partial(_resnet, "resnet50", Bottleneck, (3, 4, 6, 3))
