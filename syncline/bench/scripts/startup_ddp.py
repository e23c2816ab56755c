"""One training step with DistributedDataParallel, as PyTorch's tutorial writes it. Started by torchrun."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline.bench.scripts.startup_samples import BATCH, CLASSES, samples

__all__ = ["main"]


def main() -> None:
    """Train one step on this rank's part of the batch; rank 0 says when it was complete."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    share = BATCH // size
    images, labels = (torch.from_numpy(array[rank * share : (rank + 1) * share]) for array in samples())
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 20, kernel_size=5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, kernel_size=5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, CLASSES),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    optimizer.step()
    if rank == 0:
        done = {"event": "progress", "rank": 0, "step": 1, "time": time.time()}
        sys.stdout.write(json.dumps(done) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
