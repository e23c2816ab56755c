"""The optimizers that torch lacks, by their equations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncline.comms.parameter_server.optimizer import dump_optimizer, load_optimizer
from syncline.models import optimizers
from syncline.models.optimizers import LAMB, LARS, AdaBelief, Lion, Yogi

WEIGHT = torch.tensor([[3.0, -4.0], [0.5, 1.0]])
GRADIENT = torch.tensor([[0.6, 0.0], [-0.8, 2.0]])


def stepped(kind: type, steps: int = 1, **options: float) -> torch.Tensor:
    weight = nn.Parameter(WEIGHT.clone())
    optimizer = kind([weight], **options)
    for _ in range(steps):
        weight.grad = GRADIENT.clone()
        optimizer.step()
    return weight.detach()


def test_lion_moves_by_the_sign_and_decays_apart_from_it():
    expected = WEIGHT * (1 - 0.1 * 0.2) - 0.1 * GRADIENT.sign()
    assert torch.allclose(stepped(Lion, lr=0.1, weight_decay=0.2), expected)


def test_yogis_first_step_is_adams():
    assert torch.allclose(stepped(Yogi, lr=0.1, eps=1e-8), stepped(torch.optim.Adam, lr=0.1), atol=1e-6)


def test_yogis_second_moment_grows_by_addition():
    # The same gradient twice: v1 = (1 - b2) g^2, and v2 = v1 + (1 - b2) g^2.
    moment = 2 * 0.001 * GRADIENT**2 / (1 - 0.999**2)
    mean = (1 - 0.9**2) * GRADIENT / (1 - 0.9**2)
    expected = stepped(Yogi, lr=0.1, eps=1e-8) - 0.1 * mean / (moment.sqrt() + 1e-8)
    assert torch.allclose(stepped(Yogi, 2, lr=0.1, eps=1e-8), expected, atol=1e-5)


def test_adabeliefs_first_step_goes_by_the_surprise():
    surprise = (GRADIENT - 0.1 * GRADIENT) ** 2 * 0.001 + 1e-8
    expected = WEIGHT - 0.1 * GRADIENT / ((surprise / 0.001).sqrt() + 1e-8)
    assert torch.allclose(stepped(AdaBelief, lr=0.1), expected, atol=1e-6)


def test_lambs_step_is_as_long_as_the_rate_times_the_weight():
    change = stepped(LAMB, lr=0.1) - WEIGHT
    assert float(change.norm()) == pytest.approx(0.1 * float(WEIGHT.norm()), rel=1e-5)


def test_larss_first_step_follows_its_equation():
    length = WEIGHT.norm()
    rate = 0.01 * length / (GRADIENT.norm() + 0.3 * length)
    expected = WEIGHT - 2.0 * rate * (GRADIENT + 0.3 * WEIGHT)
    assert torch.allclose(stepped(LARS, lr=2.0, weight_decay=0.3, trust=0.01), expected)


@pytest.mark.parametrize("kind", [Lion, Yogi, AdaBelief])
def test_rows_can_be_stepped_apart_as_servers_do(kind):
    whole = stepped(kind, 5, lr=0.1)
    rows = [nn.Parameter(row.clone()) for row in WEIGHT]
    optimizer = kind(rows, lr=0.1)
    for _ in range(5):
        for row, gradient in zip(rows, GRADIENT, strict=True):
            row.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(whole, torch.stack([row.detach() for row in rows]))


@pytest.mark.parametrize("name", optimizers.__all__)
def test_going_on_from_a_saved_state_changes_nothing(name):
    kind = getattr(optimizers, name)
    weight = nn.Parameter(WEIGHT.clone())
    optimizer = kind([weight], lr=0.1)
    weight.grad = GRADIENT.clone()
    optimizer.step()
    saved, other = copy.deepcopy(optimizer.state_dict()), nn.Parameter(weight.detach().clone())
    again = kind([other], lr=0.1)
    again.load_state_dict(saved)
    for each, parameter in ((optimizer, weight), (again, other)):
        parameter.grad = GRADIENT.clone()
        each.step()
    assert torch.equal(weight, other)


@pytest.mark.parametrize("name", optimizers.__all__)
def test_a_server_steps_with_the_shell_of_a_workers_optimizer(name):
    here, there = nn.Parameter(WEIGHT.clone()), nn.Parameter(WEIGHT.clone())
    optimizer = getattr(optimizers, name)([here], lr=0.1)
    at_server, _ = load_optimizer(dump_optimizer(optimizer), [[there]])
    for _ in range(3):
        here.grad, there.grad = GRADIENT.clone(), GRADIENT.clone()
        optimizer.step()
        at_server.step()
    assert torch.equal(here, there)
    assert not torch.equal(here, WEIGHT)


def test_a_setting_out_of_bounds_is_reported():
    with pytest.raises(ValueError, match="beta1 is 1, but must be at least 0 and less than 1"):
        Lion([nn.Parameter(WEIGHT)], betas=(1.0, 0.9))
