"""The task of `lab/bench/engines.py`: LeNet on random images of MNIST's shape, in memory."""

from __future__ import annotations

import torch

import syncline

_generator = torch.Generator().manual_seed(0)
task = syncline.Task(
    model="lenet",
    data=(
        torch.randn(4096, 1, 28, 28, generator=_generator),
        torch.randint(0, 10, (4096,), generator=_generator),
    ),
    optimizer=syncline.sgd(lr=0.01),
)
