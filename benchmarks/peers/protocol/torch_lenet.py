"""LeNet-5 and its batches for all adapters that are built on torch."""

from __future__ import annotations

import torch
from peer_protocol import CLASSES, LR, MOMENTUM, samples
from torch import nn


def lenet() -> nn.Module:
    """61,706 parameters, the same for every worker."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def batches(rank: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = (torch.from_numpy(array) for array in samples(rank, batch))
    return list(zip(images, labels, strict=True))


def trains(model, optimizer, data, backward=lambda loss: loss.backward()):
    """One step of the usual loop, as a function of the number of its batch."""

    def step(number: int) -> None:
        images, labels = data[number]
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()

    return step
