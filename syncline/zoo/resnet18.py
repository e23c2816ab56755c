"""ResNet-18 (He, Zhang, Ren & Sun, 2015) for small images such as CIFAR's.

The four stages of two basic blocks are those of the paper's table 1. The stem is the one of its section 4.2: a 3x3
convolution of stride 1 in place of 7x7 with stride 2, and no max-pooling, for 32 x 32 pixels cannot be halved five
times. Shortcuts that change the shape are 1x1 convolutions (option B). With 10 classes it has 11,173,962 parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.errors import ConfigError

__all__ = ["BasicBlock", "build"]


def build(input_shape: tuple[int, ...], classes: int, width: object) -> nn.Module:
    """Stages of `width`, 2, 4 and 8 times `width` channels, averaged over the image and classified.

    Convolutions are initialised as in He et al., Delving Deep into Rectifiers (2015), keeping the variance backward.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"The model 'resnet18' was asked for samples of shape {input_shape}, but it convolves images: it needs "
            "(channels, height, width). Reshape the samples, for example to (3, 32, 32), or choose 'mlp' or 'linear', "
            "which take any shape."
        )
    if type(width) is not int or width < 1:
        raise ConfigError(
            f"The option width of the model 'resnet18' is {width!r}, but it is the number of channels of the first "
            "stage. Give an integer of 1 or more; the paper has 64."
        )
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(_convolution(input_shape[0], width, 3, 1), nn.BatchNorm2d(width), nn.ReLU()))
    channels = width
    for stage in range(4):
        wider = width * 2**stage
        stride = 1 if stage == 0 else 2
        blocks = nn.Sequential(BasicBlock(channels, wider, stride), BasicBlock(wider, wider, 1))
        model.add_module(f"stage{stage + 1}", blocks)
        channels = wider
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classify", nn.Linear(channels, classes))
    return model


class BasicBlock(nn.Module):
    """relu(F(x) + shortcut(x)), where F is two 3x3 convolutions, each with batch normalisation."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _convolution(channels_in, channels_out, 3, stride),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            _convolution(channels_out, channels_out, 3, 1),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                _convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for a batch of images."""
        return torch.relu(self.residual(x) + self.shortcut(x))


def _convolution(channels_in: int, channels_out: int, side: int, stride: int) -> nn.Conv2d:
    """Without bias, which the batch normalisation that follows would cancel."""
    layer = nn.Conv2d(channels_in, channels_out, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
