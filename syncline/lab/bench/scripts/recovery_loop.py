"""A training loop of one's own for `syncline run`, with the model and the data of `recovery_ddp.py`. It has no end.

recovery_loop.py SAMPLES BATCH
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.lab.bench.scripts.recovery_ddp import LR, MOMENTUM, mlp

_EPOCHS = 1_000_000


def main(samples: Path, batch: int) -> None:
    """Train until the bench ends the run."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loader = DataLoader(TensorDataset(*torch.load(samples)), batch_size=batch, shuffle=True)
    worker = syncline.worker()  # type: ignore[operator]  # mypy does not know the type of a name that is imported on first use
    model, optimizer, batches = worker.prepare(model, optimizer, loader)
    for _ in worker.epochs(_EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            optimizer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
