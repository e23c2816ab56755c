"""Every model, in a small version, learns from real data within seconds: scanned digits, or the text of a licence."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from syncline import zoo
from syncline.data.named import named

LICENCE = Path(__file__).parents[3] / "LICENSE"
BLOCK = 32


class Lesson(NamedTuple):
    """A small version of a model, how long it learns, and what it must reach."""

    options: dict[str, object]
    steps: int = 60
    lr: float = 0.003
    batch: int = 32
    accuracy: float = 0.85
    enlarged: int = 1
    """How many times as large the 8 x 8 digits are made."""


CLASSIFIERS = {
    "linear": Lesson({}, steps=150, lr=0.03),
    "mlp": Lesson({"hidden": (32,)}, steps=100, lr=0.01),
    "lenet": Lesson({}),
    "lstm": Lesson({"hidden": 48}, steps=150, lr=0.02),
    "alexnet": Lesson({"hidden": 64, "dropout": 0.0}, steps=30, lr=0.0005, batch=12, accuracy=0.5, enlarged=2),
    "vgg11": Lesson({"hidden": 32, "dropout": 0.0}, steps=30, accuracy=0.7),
    "googlenet": Lesson({}, steps=25, accuracy=0.7),
    "resnet18": Lesson({"width": 8}, steps=40, lr=0.01),
    "resnet34": Lesson({"width": 8}, steps=40, lr=0.01),
    "resnet50": Lesson({"width": 8}, steps=50, lr=0.01),
}
READERS = {
    "lstm": Lesson({"hidden": 64}, steps=120, lr=0.02),
    "transformer": Lesson({"width": 48, "layers": 2}, steps=150, lr=0.005),
}
AUTOENCODERS = {
    "autoencoder": Lesson({"hidden": (32, 12)}, steps=150, lr=0.01),
    "stacked-autoencoder": Lesson({"hidden": (32, 12)}, steps=240, lr=0.01),
}


@functools.cache
def digits(part: str, enlarged: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    data = named("digits")
    inputs, targets = data.load(data.locate(None, None), part)  # type: ignore[arg-type]
    large = torch.from_numpy(inputs).repeat_interleave(enlarged, 2).repeat_interleave(enlarged, 3)
    return (large - 0.3) / 0.4, torch.from_numpy(targets)


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Windows of the licence, and the same one character later."""
    words = LICENCE.read_text()
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
        chosen = torch.randint(len(inputs), (lesson.batch,))
        value = loss(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_every_model_has_its_lesson() -> None:
    assert {*CLASSIFIERS, *READERS, *AUTOENCODERS} == set(zoo.names())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_learns_to_read_digits_that_it_has_not_seen(name: str) -> None:
    torch.manual_seed(0)
    lesson = CLASSIFIERS[name]
    inputs, targets = digits("train", lesson.enlarged)
    model = zoo.build(name, tuple(inputs.shape[1:]), 10, **lesson.options)
    learn(model, inputs, targets, lesson)
    unseen, meant = digits("test", lesson.enlarged)
    with torch.inference_mode():
        accuracy = (model.eval()(unseen[:200]).argmax(1) == meant[:200]).float().mean()
    assert accuracy > lesson.accuracy


@pytest.mark.parametrize("name", READERS)
def test_a_reader_learns_what_letter_comes_next(name: str) -> None:
    torch.manual_seed(0)
    inputs, targets, letters = text()
    model = zoo.build(name, (BLOCK,), letters, letters, **READERS[name].options)
    losses = learn(model, inputs, targets, READERS[name])
    often = torch.bincount(targets.flatten()).float() / targets.numel()
    without_context = -(often[often > 0] * often[often > 0].log()).sum()  # the best that can be said without reading
    assert losses[-1] < without_context - 0.6


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
