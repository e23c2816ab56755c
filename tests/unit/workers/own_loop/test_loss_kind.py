"""Telling a summed loss from a mean by its graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncline.workers.own_loop.loss_kind import is_sum

MODEL = nn.Linear(4, 3)
OUT = MODEL(torch.ones(8, 4))
CLASSES = torch.zeros(8, dtype=torch.long)
ZEROS = torch.zeros(8, 3)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy(OUT, CLASSES, reduction="sum"),
        F.nll_loss(F.log_softmax(OUT, 1), CLASSES, reduction="sum"),
        F.mse_loss(OUT, ZEROS, reduction="sum"),
        F.binary_cross_entropy(OUT.sigmoid(), ZEROS, reduction="sum") - 0.5 * OUT.pow(2).sum(),
        F.cross_entropy(OUT, CLASSES, reduction="none").sum(),
        F.mse_loss(OUT, ZEROS, reduction="sum") * 1024.0,
    ],
)
def test_sums_are_found(loss):
    assert is_sum(loss)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy(OUT, CLASSES),
        F.cross_entropy(OUT, CLASSES) / 4,
        F.cross_entropy(OUT, CLASSES, reduction="sum") / 8,
        OUT.pow(2).sum(1).mean(),
        F.cross_entropy(OUT, CLASSES) + 0.01 * sum(p.pow(2).sum() for p in MODEL.parameters()),
        torch.tensor(1.0, requires_grad=True),
        OUT,
    ],
)
def test_means_and_what_cannot_be_told_are_no_sums(loss):
    assert not is_sum(loss)
