"""Optimizers by name are fused where torch can, and do the same as those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import syncline
from syncline.task import Task
from syncline.workers.build import build_optimizer

SPECS = [
    syncline.sgd(lr=0.1), syncline.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3), syncline.adam(lr=0.01),
    syncline.adamw(lr=0.01),
]  # fmt: skip


def made(spec: Any, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return build_optimizer(Task(model=model, data=(torch.zeros(1),), optimizer=spec), model, **options)


class Parts(nn.Module):
    """One of its layers is used later than the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.late = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        return self.second(self.late(x) if self.calls > 2 else x)


def trained(spec: Any, *, may_fuse: bool) -> list[torch.Tensor]:
    model = Parts()
    optimizer = made(spec, model, may_fuse=may_fuse)
    assert bool(optimizer.defaults.get("fused")) == may_fuse
    for number in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((3, 4), float(number + 1))).square().mean())
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_fused_optimizer_does_the_same_also_where_a_layer_is_used_late(spec):
    for fused, plain in zip(trained(spec, may_fuse=True), trained(spec, may_fuse=False), strict=True):
        torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        (syncline.sgd(lr=0.1, fused=False), nn.Linear(2, 2)),
        (syncline.sgd(lr=0.1, foreach=True), nn.Linear(2, 2)),
        (syncline.sgd(lr=0.1, momentum=0.9, dampening=0.5), nn.Linear(2, 2)),
        (syncline.optimizer("Rprop"), nn.Linear(2, 2)),
        (syncline.sgd(lr=0.1), nn.Embedding(4, 2, sparse=True)),
    ],
    ids=str,
)
def test_what_the_user_decides_and_what_torch_cannot_do_stays_as_it_is(spec, model):
    optimizer = made(spec, model)
    assert not optimizer.defaults.get("fused")
    assert optimizer.state == {}
