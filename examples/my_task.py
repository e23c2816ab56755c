"""Define any model, loss and data as a task:

syncline train my_task.py:task --workers 4
"""

import torch
from torch import nn

import syncline


class Spiral(torch.utils.data.Dataset):
    """Points on three spirals in the plane; the label is the spiral."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 3, (count,), generator=generator)
        radius = torch.rand(count, generator=generator)
        angle = 4 * radius + 2.1 * self.label + 0.1 * torch.randn(count, generator=generator)
        self.point = torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.point[index], self.label[index]


task = syncline.Task(
    model=nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
    data=Spiral(6000, seed=0),
    test=Spiral(1000, seed=1),
    loss="cross_entropy",
    optimizer=syncline.adam(lr=0.01),
    schedule="CosineAnnealingLR",
    metrics=["accuracy"],
)
