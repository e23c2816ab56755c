"""AlexNet (Krizhevsky, Sutskever & Hinton, 2012), for small images too.

Five convolutions with 96, 256, 384, 384 and 256 channels, three of them pooled (3x3, stride 2), then two wide linear
layers with dropout and one of width `classes`. For ImageNet's (3, 224, 224) and 1000 classes these are the paper's
layers on one GPU instead of two, 62,378,344 parameters, without its local response normalization, which later work
(VGG, 2014) found useless. A first convolution of 11x11 with stride 4 would eat up a small image: with a side
below 63 it is 5x5 with stride 1.
"""

from __future__ import annotations

from torch import nn

from syncline.models.zoo.options import check_dropout, check_images, check_whole

_LARGE_SIDE = 63  # from here on, something is left after a first convolution of stride 4
_SMALLEST_SIDE = 15  # one value is left after pooling by 3 with stride 2 three times
_MOST_FEATURES = 6  # the paper's linear layers see 6 x 6 positions; larger feature maps are pooled to that


def build(input_shape: tuple[int, ...], classes: int, hidden: object, dropout: object) -> nn.Module:
    """Linear layers of width `hidden`, each after dropout.

    Weights, but for the last layer's, are initialized as in He et al., Delving Deep into Rectifiers (2015): with
    torch's defaults, which are smaller, the loss had not moved after 40 steps on MNIST.
    """
    check_images("alexnet", input_shape, _SMALLEST_SIDE)
    width = check_whole("alexnet", "hidden", hidden, "the width of the two hidden linear layers; the paper has 4096")
    left_out = check_dropout("alexnet", dropout)
    channels, *sides = input_shape
    is_large = min(sides) >= _LARGE_SIDE
    first = nn.Conv2d(channels, 96, 11, stride=4, padding=2) if is_large else nn.Conv2d(channels, 96, 5, padding=2)
    height, breadth = (min(_features(side, is_large), _MOST_FEATURES) for side in sides)
    model = nn.Sequential(
        first, nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d((height, breadth)), nn.Flatten(),
        nn.Dropout(left_out), nn.Linear(256 * height * breadth, width), nn.ReLU(),
        nn.Dropout(left_out), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip
    for layer in list(model)[:-1]:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def _features(side: int, is_large: bool) -> int:
    """The length of a side after all convolutions and poolings."""
    if is_large:
        side = (side + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 1) // 2
    return side
