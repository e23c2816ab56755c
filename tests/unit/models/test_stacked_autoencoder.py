"""The stacked autoencoder's stages: which part of it each of them uses and moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.errors import ConfigError
from syncline.models import zoo
from syncline.models.zoo.stacked_autoencoder import StackedAutoencoder


def stacked(pretrain: float = 0.9, hidden: tuple[int, ...] = (6, 5, 4)) -> StackedAutoencoder:
    model = zoo.build("stacked-autoencoder", (1, 4, 2), 10, hidden=hidden, pretrain=pretrain)
    assert isinstance(model, StackedAutoencoder)
    return model


def moved(model: nn.Module) -> set[str]:
    """The layers that a loss gives a gradient to."""
    inputs = torch.randn(5, 1, 4, 2)
    nn.functional.mse_loss(model(inputs), inputs).backward()
    found = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_each_stage_moves_one_pair_of_layers_and_the_last_one_all() -> None:
    torch.manual_seed(0)
    model = stacked()
    pairs = [{f"encoders.{n}", f"decoders.{n}"} for n in range(3)]
    for number, done in enumerate((0.0, 0.3, 0.6)):
        model.enter_stage(done)
        assert moved(model) == pairs[number]
    model.enter_stage(0.9)
    assert moved(model) == set().union(*pairs)


def test_a_model_that_has_no_stage_set_is_the_whole_network() -> None:
    model = stacked()
    inputs = torch.randn(2, 1, 4, 2)
    told = stacked()
    told.load_state_dict(model.state_dict())
    told.enter_stage(0.95)
    assert torch.equal(model(inputs), told(inputs))


def test_in_every_stage_the_output_has_the_shape_of_the_input() -> None:
    model = stacked()
    for done in (0.0, 0.5, 0.7, 0.99):
        model.enter_stage(done)
        assert model(torch.randn(3, 1, 4, 2)).shape == (3, 1, 4, 2)


def test_without_pre_training_there_is_one_stage() -> None:
    model = stacked(pretrain=0)
    assert {model.stage_at(done / 10) for done in range(10)} == {"whole"}


@given(
    layers=st.integers(1, 6),
    percent=st.integers(1, 99),
    total=st.integers(10, 500),
)
def test_stages_come_in_order_and_each_has_its_even_share_of_the_steps(layers: int, percent: int, total: int) -> None:
    model = stacked(percent / 100, (2,) * layers)
    stages = [model.stage_at(step / total) for step in range(total)]
    order = [*(f"layer{n + 1}" for n in range(layers)), "whole"]
    assert [order.index(stage) for stage in stages] == sorted(order.index(stage) for stage in stages)
    share = total * percent / 100 / layers
    assert all(abs(stages.count(name) - share) <= 1 for name in order[:-1])


@pytest.mark.parametrize("pretrain", [1, -0.1, "all", True])
def test_a_share_of_the_steps_that_is_none_is_refused(pretrain: object) -> None:
    with pytest.raises(ConfigError, match="option pretrain of the model 'stacked-autoencoder'"):
        zoo.build("stacked-autoencoder", (4,), 2, hidden=(3,), pretrain=pretrain)
