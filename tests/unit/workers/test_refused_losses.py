"""Losses and models that cannot be trained, and checkpoints of other models, are refused with the fix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import ANOTHER_MODEL, CheckpointError, ConfigError
from syncline.workers.forward import check_trainable, loss_of
from syncline.workers.train_state import Parts, TrainState, load_model

BATCH = (torch.randn(4, 3), torch.zeros(4, dtype=torch.long))


def refused(model: nn.Module, loss: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loss_of(model, loss, BATCH)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("value", "kind"), [("high", "str"), (0.5, "float"), (None, "NoneType"), ([torch.zeros(())], "list")]
)
def test_a_loss_that_is_no_tensor_is_refused_with_its_type(value, kind):
    error = refused(nn.Linear(3, 2), lambda *_: value)
    assert (error.code, error.facts) == ("loss-type", {"type": kind})


def test_a_detached_loss_is_refused_in_training_and_accepted_in_evaluation():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target).detach()

    model = nn.Linear(3, 2)
    assert refused(model, loss).code == "detached-loss"
    assert loss_of(model.eval(), loss, BATCH)[0].dim() == 0
    with torch.no_grad():
        assert loss_of(model.train(), loss, BATCH)[0].dim() == 0


def test_a_model_with_everything_frozen_is_refused():
    model = nn.Linear(3, 2).requires_grad_(False)
    assert refused(model, nn.functional.cross_entropy).code == "nothing-to-train"
    with pytest.raises(ConfigError) as caught:
        check_trainable(model)
    assert caught.value.facts == {"parameters": 2}
    with pytest.raises(ConfigError) as caught:
        check_trainable(nn.ReLU())
    assert caught.value.facts == {"parameters": 0}
    model.bias.requires_grad_(True)
    check_trainable(model)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences_and_not_all_keys():
    with pytest.raises(CheckpointError) as caught:
        load_model(
            nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict(),
        )
    assert caught.value.code == ANOTHER_MODEL
    assert caught.value.facts == {
        "missing": ["1.weight", "1.bias"], "unknown": ["2.weight", "2.bias"], "shapes": ["0.weight", "0.bias"],
    }  # fmt: skip
    assert "\t" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_checkpoint_of_another_optimizer_is_refused():
    def state(*extra: nn.Module) -> TrainState:
        model = nn.Linear(3, 2)
        groups = [{"params": model.parameters()}, *({"params": each.parameters()} for each in extra)]
        return TrainState(lambda: Parts(model, torch.optim.SGD(groups, lr=0.1)))

    with pytest.raises(CheckpointError) as caught:
        state().load(state(nn.Linear(1, 1)).state())
    assert caught.value.code == ANOTHER_MODEL
