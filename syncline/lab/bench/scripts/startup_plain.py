"""One training step in one process, without any framework."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

from syncline.lab.bench.scripts.startup_samples import CLASSES, samples


def lenet() -> nn.Module:
    """Caffe's LeNet for images of 28 x 28, as a user would write it."""
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


def main() -> None:
    """Train one step and report its end."""
    images, labels = (torch.from_numpy(array) for array in samples())
    torch.manual_seed(0)
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    optimizer.step()
    done = {"event": "progress", "worker_id": 0, "step": 1, "time": time.time(), "loss": loss.item()}
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
