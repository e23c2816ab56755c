"""One training step in one process, without any framework."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

from syncline.bench.scripts.startup_samples import CLASSES, samples

__all__ = ["main"]


def main() -> None:
    """Train one step and say when it was complete."""
    images, labels = (torch.from_numpy(array) for array in samples())
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, CLASSES),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    optimizer.step()
    done = {"event": "progress", "rank": 0, "step": 1, "time": time.time(), "loss": loss.item()}
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
