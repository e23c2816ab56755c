"""Gradients accumulated over batches of which this worker has parts of different sizes."""

from __future__ import annotations

import pytest
import torch

from syncline.workers.own_loop.gradient_weights import GradientWeights


def accumulated(weights: list[float], gradients: list[float]) -> float:
    """What this worker contributes: the gradient that it has at the end, times its weight."""
    p = torch.nn.Parameter(torch.zeros(1))
    tracked = GradientWeights()
    tracked.begin()
    for weight, gradient in zip(weights, gradients, strict=True):
        tracked.end_batch()
        tracked.take(weight, lambda: [p])
        (p * gradient).sum().backward()
    tracked.end_batch()
    assert p.grad is not None
    return float(p.grad) * tracked.of_gradients(weights[-1], None, len(weights))


@pytest.mark.parametrize("weights", [[0.5], [0.5, 0.5], [0.25, 0.5, 0.75], [0.5, 0.0], [0.0, 0.5], [0.5, 0.0, 0.25]])
def test_each_batch_counts_by_its_own_weight(weights):
    gradients = [3.0, 5.0, 7.0][: len(weights)]
    expected = sum(w * g for w, g in zip(weights, gradients, strict=True))
    assert accumulated(weights, gradients) == pytest.approx(expected)


def test_the_gradient_of_a_batch_without_samples_is_taken_back_even_if_it_is_not_finite():
    assert accumulated([0.0], [float("nan")]) == 0.0


def test_a_summed_loss_counts_in_full_and_a_mean_over_batches_is_divided():
    tracked = GradientWeights()
    tracked.is_summed = True
    tracked.take(0.25, list)
    assert tracked.of_gradients(0.25, None, 1) == 1.0
    assert tracked.of_gradients(0.25, 4, 4) == 0.25
