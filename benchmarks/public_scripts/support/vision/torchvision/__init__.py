"""A small stand-in for torchvision, for machines that have none: as much as the public scripts use.

MNIST is read from the files in $MNIST, the first $IMAGES of them; CIFAR-10 is random; resnet18 is one convolution.
"""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
