"""Training in stages: the stage follows from the step, and what a stage leaves alone stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.data.order import Position
from syncline.models import zoo
from syncline.workers.stages import Stages

TOTAL = 20


def at(step: int, extra: int = 0) -> Position:
    return Position(step=step, extra=extra)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, notes: list[str] | None = None) -> None:
    stages, generator = Stages(TOTAL), torch.Generator().manual_seed(1)
    inputs = torch.randn(TOTAL, 16, 8, generator=generator)
    for step in steps:
        note = stages.before_step(model, optimizer, at(step))
        if note and notes is not None:
            notes.append(note.message)
        for parameter in model.parameters():  # as in a run, where gradients live in one flat buffer
            parameter.grad = torch.zeros_like(parameter)
        nn.functional.mse_loss(model(inputs[step]), inputs[step]).backward()
        optimizer.step()


def stacked() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("stacked-autoencoder", (8,), 2, hidden=(6, 4), pretrain=0.8)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_momentum_does_not_move_layers_whose_stage_is_over(kind: str) -> None:
    model = stacked()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(8))
    first, second = ({n: p.detach().clone() for n, p in model.named_parameters() if f".{k}." in n} for k in (0, 1))
    train(model, optimizer, range(8, 16))
    now = dict(model.named_parameters())
    assert all(torch.equal(before, now[name]) for name, before in first.items())
    assert not any(torch.equal(before, now[name]) for name, before in second.items())


def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_bits() -> None:
    whole = stacked()
    train(whole, torch.optim.Adam(whole.parameters(), lr=0.01), range(TOTAL))
    for stop in (3, 8, 9, 16):
        model = stacked()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, range(stop))
        again = stacked()
        again.load_state_dict(model.state_dict())
        resumed = torch.optim.Adam(again.parameters(), lr=0.01)
        resumed.load_state_dict(optimizer.state_dict())
        train(again, resumed, range(stop, TOTAL))
        assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_each_stage_is_told_once() -> None:
    model, notes = stacked(), []
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(TOTAL), notes)
    assert notes == [
        "training in stages: layer1 from step 0 on",
        "training in stages: layer2 from step 8 on",
        "training in stages: whole from step 16 on",
    ]


def test_an_evaluation_is_of_the_stage_that_has_just_been_trained() -> None:
    model, stages = stacked(), Stages(TOTAL)
    assert stages.before_evaluation(model, at(8)) == "layer1"
    assert stages.before_evaluation(model, at(9)) == "layer2"
    assert stages.before_evaluation(model, at(12, extra=4)) == "layer1"  # steps that make up for others do not count
    assert stages.before_evaluation(model, at(TOTAL)) == "whole"


def test_other_models_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    assert Stages(TOTAL).before_step(model, optimizer, at(0)) is None
    assert Stages(TOTAL).before_evaluation(model, at(5)) is None
    now = [s["momentum_buffer"] for s in optimizer.state.values()]
    assert all(torch.equal(b, n) for b, n in zip(before, now, strict=True))
