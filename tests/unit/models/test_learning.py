"""Every model, in a small version, learns from real data within seconds: scanned digits, or the text of a license."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from syncline.data.named import named
from syncline.models import zoo

LICENSE = Path(__file__).parents[3] / "LICENSE"
BLOCK, BATCH = 32, 16


class Lesson(NamedTuple):
    """A small version of a model, and how long it learns."""

    options: dict[str, object]
    steps: int = 60
    lr: float = 0.003
    digits: int = 10
    """How many of the digits it is to tell apart; fewer are learned sooner."""
    enlarged: int = 1
    """How many times as large the 8 x 8 digits are made."""


CLASSIFIERS = {
    "linear": Lesson({}, steps=200, lr=0.03),
    "mlp": Lesson({"hidden": (32,)}, steps=150, lr=0.01),
    "lenet": Lesson({}, steps=120),
    "lstm": Lesson({"hidden": 32}, steps=60, lr=0.02, digits=2),
    "alexnet": Lesson({"hidden": 64, "dropout": 0.0}, steps=12, lr=0.0003, digits=2, enlarged=2),
    "vgg11": Lesson({"hidden": 32, "dropout": 0.0}, steps=16, lr=0.001, digits=2),
    "googlenet": Lesson({"dropout": 0.0}, steps=14, digits=2),
    "resnet18": Lesson({"width": 8}, steps=25, lr=0.01, digits=2),
    "resnet34": Lesson({"width": 8}, steps=25, lr=0.01, digits=2),
    "resnet50": Lesson({"width": 4}, steps=25, lr=0.01, digits=2),
}
READERS = {
    "lstm": Lesson({"hidden": 48}, steps=80, lr=0.02),
    "transformer": Lesson({"width": 32, "layers": 1}, steps=120, lr=0.01),
}
AUTOENCODERS = {
    "autoencoder": Lesson({"hidden": (32, 12)}, steps=150, lr=0.01),
    "stacked-autoencoder": Lesson({"hidden": (32, 12)}, steps=240, lr=0.01),
}


@functools.cache
def digits(part: str, enlarged: int = 1, different: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    data = named("digits")
    inputs, targets = map(torch.from_numpy, data.load(data.locate(None, None), part))  # type: ignore[arg-type]
    inputs, targets = inputs[targets < different], targets[targets < different]
    large = inputs.repeat_interleave(enlarged, 2).repeat_interleave(enlarged, 3)
    return (large - 0.3) / 0.4, targets


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Windows of the license, and the same one character later."""
    words = LICENSE.read_text()
    letters = sorted(set(words))
    tokens = torch.tensor([letters.index(c) for c in words])
    return tokens[:-1].unfold(0, BLOCK, BLOCK // 2), tokens[1:].unfold(0, BLOCK, BLOCK // 2), len(letters)


def learn(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, lesson: Lesson, loss=None) -> list[float]:
    """The losses on the way."""
    loss, losses = loss or nn.functional.cross_entropy, []
    optimizer = torch.optim.Adam(model.parameters(), lr=lesson.lr)
    for step in range(lesson.steps):
        if hasattr(model, "enter_stage"):
            model.enter_stage(step / lesson.steps)
        chosen = torch.randint(len(inputs), (BATCH,))
        value = loss(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models as small as these gain nothing from more, and lose much when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_model_has_its_lesson() -> None:
    by_gradients = {
        name for name in zoo.names() if zoo.card(name).learns_by == "gradients"
    }  # test_destin.py has others
    assert {*CLASSIFIERS, *READERS, *AUTOENCODERS} == by_gradients


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_learns_to_read_digits_that_it_has_not_seen(name: str) -> None:
    torch.manual_seed(0)
    lesson = CLASSIFIERS[name]
    inputs, targets = digits("train", lesson.enlarged, lesson.digits)
    model = zoo.build(name, tuple(inputs.shape[1:]), lesson.digits, **lesson.options)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.5  # of a few steps, the first ones should not weigh long
    learn(model, inputs, targets, lesson)
    unseen, meant = (part[:60] for part in digits("test", lesson.enlarged, lesson.digits))
    with torch.inference_mode():
        accuracy = (model.eval()(unseen).argmax(1) == meant).float().mean()
    assert accuracy > (0.85 if lesson.digits == 10 else 0.9)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_learns_what_letter_comes_next(name: str) -> None:
    torch.manual_seed(0)
    inputs, targets, letters = text()
    model = zoo.build(name, (BLOCK,), letters, letters, **READERS[name].options)
    losses = learn(model, inputs, targets, READERS[name])
    often = torch.bincount(targets.flatten()).float() / targets.numel()
    without_context = -(often[often > 0] * often[often > 0].log()).sum()  # the best that can be said without reading
    assert losses[-1] < without_context - 0.4


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_an_autoencoder_learns_to_give_back_digits_that_it_has_not_seen(name: str) -> None:
    torch.manual_seed(0)
    inputs, _ = digits("train")
    unseen, _ = digits("test")
    model = zoo.build(name, (1, 8, 8), 10, **AUTOENCODERS[name].options)
    learn(model, inputs, inputs, AUTOENCODERS[name], nn.functional.mse_loss)
    with torch.inference_mode():
        error = nn.functional.mse_loss(model.eval()(unseen), unseen)
    mean_digit = nn.functional.mse_loss(inputs.mean(0).expand_as(unseen), unseen)
    assert error < 0.5 * mean_digit


def test_a_stacked_autoencoders_error_falls_in_every_stage() -> None:
    torch.manual_seed(0)
    inputs, _ = digits("train")
    lesson = AUTOENCODERS["stacked-autoencoder"]
    model = zoo.build("stacked-autoencoder", (1, 8, 8), 10, **lesson.options, pretrain=0.8)
    losses = learn(model, inputs, inputs, lesson, nn.functional.mse_loss)
    stages = [model.stage_at(step / lesson.steps) for step in range(lesson.steps)]
    for stage in ("layer1", "layer2"):
        own = [value for value, at in zip(losses, stages, strict=True) if at == stage]
        assert sum(own[-5:]) < 0.6 * sum(own[:5])
