"""VGG-11 (Simonyan & Zisserman, 2014): 3x3 convolutions, pooled by 2 five times, and three linear layers.

It is the paper's configuration A. Without batch normalization, for ImageNet's (3, 224, 224) and 1000 classes, it has
the paper's 132,863,336 parameters. Batch normalization, which came a year later, is on unless it is switched off:
without it the paper's authors had to train the shallow networks first, to begin the deep ones with their weights. A
pooling that would leave nothing of a small image is left out.
"""

from __future__ import annotations

from torch import nn

from syncline.models.zoo.options import check_dropout, check_images, check_switch, check_whole

_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""The channels of the convolutions; after each stage the image is pooled."""
_MOST_FEATURES = 7  # the paper's linear layers see 7 x 7 positions; larger feature maps are pooled to that


def vgg11(
    input_shape: tuple[int, ...], classes: int, hidden: object, dropout: object, batch_norm: object
) -> nn.Sequential:
    """Linear layers of width `hidden`, each before dropout.

    Convolutions are initialized as in He et al., Delving Deep into Rectifiers (2015), keeping the variance backward.
    """
    check_images("vgg11", input_shape)
    width = check_whole("vgg11", "hidden", hidden, "the width of the two hidden linear layers; the paper has 4096")
    left_out = check_dropout("vgg11", dropout)
    normalizes = check_switch("vgg11", "batch_norm", batch_norm)
    channels, height, breadth = input_shape
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for channels_out in stage:
            layers += _convolution(channels, channels_out, normalizes)
            channels = channels_out
        if min(height, breadth) >= 2:
            layers.append(nn.MaxPool2d(2))
            height, breadth = height // 2, breadth // 2
    height, breadth = min(height, _MOST_FEATURES), min(breadth, _MOST_FEATURES)
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d((height, breadth)), nn.Flatten(),
        nn.Linear(channels * height * breadth, width), nn.ReLU(), nn.Dropout(left_out),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(left_out),
        nn.Linear(width, classes),
    )  # fmt: skip


def _convolution(channels_in: int, channels_out: int, normalizes: bool) -> list[nn.Module]:
    layer = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=not normalizes)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(channels_out), nn.ReLU()] if normalizes else [layer, nn.ReLU()]
