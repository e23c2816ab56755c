"""LeNet as Caffe defines it (`examples/mnist/lenet_train_test.prototxt`), for images of other sizes too.

For MNIST's (1, 28, 28) and 10 classes it is exactly Caffe's: no padding, 431,080 parameters. A side shorter than 28,
as in the 8 x 8 digits, would be eaten up by the two 5 x 5 convolutions, so along that side they are padded by 2 and
keep its length.
"""

from __future__ import annotations

from torch import nn

from syncline.models.zoo.options import check_images

_STANDARD_SIDE = 28
_SMALLEST_SIDE = 4  # one value is left after pooling by 2 twice


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Convolutions with 20 and 50 channels, each pooled by 2, then linear layers of width 500 and `classes`."""
    check_images("lenet", input_shape, _SMALLEST_SIDE)
    channels, *sides = input_shape
    height_padding, width_padding = (0 if side >= _STANDARD_SIDE else 2 for side in sides)
    padding = (height_padding, width_padding)
    height, width = (_pooled(_pooled(side, pad), pad) for side, pad in zip(sides, padding, strict=True))
    return nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=5, padding=padding),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5, padding=padding),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * height * width, 500),
        nn.ReLU(),
        nn.Linear(500, classes),
    )


def _pooled(side: int, padding: int) -> int:
    """The length of a side after one convolution and its pooling."""
    return (side + 2 * padding - 4) // 2
