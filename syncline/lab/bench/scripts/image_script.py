"""An ordinary training script with convolutions, alone, with DDP, and with the lines for `syncline run`.

    image_script.py RESULT STEPS alone|ddp|syncline

The network of the MNIST example of PyTorch, on random images, with 64 of them in each step over all processes. Rank 0
writes to RESULT how many images per second were trained in STEPS steps, after the first ones, in which Syncline tunes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
"""Images per step, over all processes."""
_WARM_UP = 25
_EPOCH = 200
"""Steps per epoch."""


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(nn.functional.max_pool2d(x, 2)), 1)
        x = self.fc2(self.dropout2(nn.functional.relu(self.fc1(x))))
        return nn.functional.log_softmax(x, dim=1)


def main(result: Path, steps: int, mode: str) -> None:
    """Train, and write the result."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * _EPOCH, 1, 28, 28), torch.randint(0, 10, (BATCH * _EPOCH,)))
    model: nn.Module = Net()
    rank = 0
    if mode == "ddp":
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data.distributed import DistributedSampler

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        loader: Any = DataLoader(data, batch_size=BATCH // size, sampler=DistributedSampler(data))
        model = DistributedDataParallel(model)
    else:
        if mode == "alone":
            torch.set_num_threads(2)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    if mode == "syncline":
        import syncline

        worker = syncline.worker()  # type: ignore[operator]  # mypy does not know the type of a name that is imported on first use
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        rank = worker.rank
    model.train()
    batches = _endless(loader)
    started = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        optimizer.step()
    if rank == 0:
        result.write_text(repr(BATCH * steps / (time.perf_counter() - started)))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
