"""Initial weights, penalties and constraints, by their mathematics."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import syncline
from syncline.models.declared.network import penalty_of
from syncline.workers.forward import loss_of


def test_what_is_said_for_the_model_concerns_matrices_and_what_a_layer_says_wins():
    model = syncline.declared(
        ["linear(6)", "batch_norm1d", {"layer": "linear(2)", "init": "constant(3)", "bias_init": "ones"}],
        init="zeros",
        bias_init="constant(0.5)",
    ).build((4,))
    assert (model[0].weight == 0).all()
    assert (model[0].bias == 0.5).all()
    assert (model[1].weight == 1).all(), "the scale of a normalization is not a matrix"
    assert (model[2].weight == 3).all()
    assert (model[2].bias == 1).all()


@pytest.mark.parametrize(
    ("name", "variance"),
    [
        ("lecun_normal", 1 / 300), ("lecun_uniform", 1 / 300), ("he_normal", 2 / 300), ("glorot_uniform", 2 / 500),
        ("variance_scaling(3.0, 'fan_out', 'normal')", 3 / 200), ("variance_scaling(1, 'fan_avg')", 1 / 250),
    ],
)  # fmt: skip
def test_initializers_have_the_variance_of_their_formula(name, variance):
    torch.manual_seed(0)
    weight = syncline.declared([{"layer": "linear(200)", "init": name}]).build((300,))[0].weight.detach()
    assert float(weight.var()) == pytest.approx(variance, rel=0.05)
    assert abs(float(weight.mean())) < 3 * math.sqrt(variance / weight.numel())


def test_delta_orthogonal_keeps_the_norm_of_what_passes_through():
    model = syncline.declared([{"layer": "conv2d(6, 3, padding=1, bias=False)", "init": "delta_orthogonal"}]).build(
        (4, 5, 5)
    )
    x = torch.randn(2, 4, 5, 5)
    assert torch.allclose(model(x).norm(), x.norm(), rtol=1e-5)


def test_penalties_are_a_term_of_the_training_loss_and_of_no_other():
    model = syncline.declared([
        {"layer": "linear(3)", "regularizer": ["l1(0.1)", "l2(0.2)"]},
        {"layer": "linear(2)", "regularizer": "elastic_net(l1=0.3, l2=0.4)"},
    ]).build((4,))  # fmt: skip
    batch = (torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]))
    first, last = model[0].weight, model[1].weight
    expected = (
        0.1 * first.abs().sum() + 0.2 * (first**2).sum() + 0.3 * last.abs().sum() + 0.4 * (last**2).sum()
    ).detach()
    trained = loss_of(model.train(), nn.functional.cross_entropy, batch)[0]
    tested = loss_of(model.eval(), nn.functional.cross_entropy, batch)[0]
    assert torch.allclose(trained - tested, expected, rtol=1e-5)
    (gradient,) = torch.autograd.grad(penalty_of(model), first)
    assert torch.allclose(gradient, 0.1 * first.sign() + 0.4 * first)


def test_a_copy_of_a_model_is_penalised_for_its_own_weights():
    model = syncline.declared(["linear(3)"], regularizer="l2(1.0)").build((4,))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    assert penalty_of(other) == 0
    assert penalty_of(model) > 0


def test_a_model_without_penalties_has_none():
    assert penalty_of(nn.Linear(2, 2)) is None


def trained_with(constraint: str) -> nn.Module:
    torch.manual_seed(0)
    model = syncline.declared([{"layer": "linear(3)", "constraint": constraint}]).build((4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.eye(4)) - 5.0).square().mean().backward()
        optimizer.step()
    return model[0]


def test_constraints_hold_after_every_update():
    assert (trained_with("max_norm(0.7)").weight.norm(dim=1) <= 0.7 + 1e-6).all()
    assert torch.allclose(trained_with("unit_norm").weight.norm(dim=1), torch.ones(3))
    assert (trained_with("non_negative").weight >= 0).all()
    assert torch.linalg.matrix_norm(trained_with("spectral_norm(n_power_iterations=20)").eval().weight, 2) < 1.01
    weight = trained_with("orthogonal").weight
    assert torch.allclose(weight @ weight.T, torch.eye(3), atol=1e-5)


def test_a_norm_within_its_bound_is_left_alone():
    torch.manual_seed(0)
    free = syncline.declared(["linear(3)"]).build((4,))[0].weight
    torch.manual_seed(0)
    bound = syncline.declared([{"layer": "linear(3)", "constraint": "max_norm(100)"}]).build((4,))[0].weight
    assert torch.equal(free, bound)
