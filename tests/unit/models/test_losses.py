"""The losses that torch lacks, by their equations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from syncline.models.losses import (
    charbonnier,
    cosine_distance,
    dice,
    focal,
    generalized_cross_entropy,
    jaccard,
    log_cosh,
    mean_percentage,
    quantile,
    squared_hinge,
    squared_log,
)

OUTPUT, TARGET = torch.tensor([1.0, 2.5, 0.0]), torch.tensor([2.0, 2.0, 4.0])
LOGITS, CLASSES = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]), torch.tensor([0, 1])


def test_losses_of_numbers_follow_their_equations():
    error = OUTPUT - TARGET
    assert torch.allclose(log_cosh(OUTPUT, TARGET), error.cosh().log().mean())
    assert torch.allclose(charbonnier(OUTPUT, TARGET, eps=0.5), (error**2 + 0.25).sqrt().mean())
    assert torch.allclose(squared_log(OUTPUT, TARGET), functional.mse_loss(OUTPUT.log1p(), TARGET.log1p()))
    assert float(mean_percentage(OUTPUT, TARGET)) == pytest.approx((0.5 + 0.25 + 1) / 3)
    assert float(quantile(OUTPUT, TARGET, q=0.9)) == pytest.approx((0.9 * 1 + 0.1 * 0.5 + 0.9 * 4) / 3)
    assert float(cosine_distance(OUTPUT[None], 3 * OUTPUT[None])) == pytest.approx(0, abs=1e-6)


def test_log_cosh_does_not_overflow():
    assert float(log_cosh(torch.tensor([1e4]), torch.zeros(1))) == pytest.approx(1e4, rel=1e-3)


def test_losses_of_classes_follow_their_equations():
    right = LOGITS.softmax(1)[[0, 1], CLASSES]
    assert torch.allclose(focal(LOGITS, CLASSES, gamma=2), (-((1 - right) ** 2) * right.log()).mean())
    assert torch.allclose(focal(LOGITS, CLASSES, gamma=0), functional.cross_entropy(LOGITS, CLASSES))
    assert torch.allclose(generalized_cross_entropy(LOGITS, CLASSES, q=1.0), (1 - right).mean())
    assert float(squared_hinge(LOGITS, CLASSES)) == pytest.approx((0 + (1 + 3.5**2)) / 2)


def test_overlap_is_counted_over_the_pixels_of_an_image():
    certain = 50 * torch.eye(2)[torch.tensor([[0, 1], [1, 1]])].permute(2, 0, 1)[None]
    assert float(dice(certain, torch.tensor([[[0, 1], [1, 1]]]))) == pytest.approx(0, abs=1e-5)
    truth = torch.tensor([[[0, 1], [1, 0]]])  # one of three pixels of class 1 is wrong
    assert float(jaccard(certain, truth)) == pytest.approx(1 - (1 / 2 + 2 / 3) / 2, abs=1e-5)
    assert float(dice(certain, truth)) == pytest.approx(1 - (2 / 3 + 4 / 5) / 2, abs=1e-5)
