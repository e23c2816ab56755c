"""A model that is to give back its input: what its data is, and what it is compared with."""

from __future__ import annotations

import torch
from torch import nn

from syncline.task import Task
from syncline.workers.build import build_model, build_sources
from syncline.workers.forward import loss_of

PAIRS = (torch.randn(9, 2, 3), torch.arange(9))


def task(**changes: object) -> Task:
    return Task(**{"model": "autoencoder(hidden=[4, 2])", "data": PAIRS, "test": PAIRS, **changes}).with_defaults()  # type: ignore[arg-type]


def test_an_autoencoder_is_compared_with_its_input_whatever_targets_the_data_has() -> None:
    train, test = build_sources(task())
    assert test is not None
    model = build_model(task(), train, seed=0)
    value, output, target = loss_of(model, nn.functional.mse_loss, train.fetch([3, 1]))
    assert torch.equal(target, PAIRS[0][[3, 1]])
    assert torch.equal(value, (output - target).square().mean())


def test_an_autoencoder_takes_data_without_targets() -> None:
    train, test = build_sources(task(data=PAIRS[0], test=None))
    assert test is None
    assert build_model(task(), train, seed=0)(PAIRS[0]).shape == (9, 2, 3)


def test_an_autoencoder_has_no_accuracy() -> None:
    assert task().metrics == ()
    assert str(task().loss) == "mse_loss"


def test_another_model_keeps_the_targets() -> None:
    train, _ = build_sources(task(model="linear"))
    assert len(train.fetch([0])) == 2


def test_a_single_array_is_compared_with_itself() -> None:
    _, _, target = loss_of(nn.Identity().eval(), nn.functional.mse_loss, (PAIRS[0],))
    assert target is PAIRS[0]
