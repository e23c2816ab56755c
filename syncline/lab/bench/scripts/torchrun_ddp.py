"""A plain DDP script for torchrun, which knows nothing of Syncline: LeNet on random images.

    torchrun_ddp.py RESULT STEPS [--kill]

Rank 0 writes to RESULT how many images per second all ranks have trained in STEPS steps. With --kill, rank 1 kills
itself after some steps of the first start, and rank 0 writes how many seconds later the second start has taken its
first step. Only necessary modules are imported: others would prolong the restart.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
"""Images per rank and step."""
_WARM_UP = 10


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def main(result: Path, steps: int, *, kill: bool) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    model = DistributedDataParallel(lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    killed = result.with_suffix(".killed")
    started = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        optimizer.step()
        if kill and killed.exists():
            if rank == 0:
                result.write_text(repr(time.time() - float(killed.read_text())))
            return
        if kill and step == _WARM_UP and rank == 1:
            killed.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        result.write_text(repr(size * BATCH * steps / (time.perf_counter() - started)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), kill="--kill" in sys.argv)
