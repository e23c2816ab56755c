"""The same network in a task file, which therefore imports torch and travels to the workers with the task."""

from __future__ import annotations

from torch import nn

from syncline import Task, sgd
from syncline.lab.bench.scripts.startup_samples import CLASSES, samples


def lenet() -> nn.Module:
    """Caffe's LeNet for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, CLASSES),
    )


task = Task(model=lenet, data=samples(), optimizer=sgd(lr=0.05, momentum=0.9))
