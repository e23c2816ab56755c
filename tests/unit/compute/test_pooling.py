"""Averages over images: gradients lie as the images do, and are what they were."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from syncline.compute.pooling import preserve_memory_format

FORMATS = [torch.contiguous_format, torch.channels_last]


class Watched(nn.Module):
    """A layer that keeps the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.came: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(self.keep)
        return x * 2

    def keep(self, gradient: torch.Tensor) -> None:
        self.came = gradient


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 3, 1), Watched(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def gradients(model: nn.Sequential, form: torch.memory_format) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Of the parameters, and what came through the average."""
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=form)
    model.to(memory_format=form)
    model(x).square().sum().backward()
    came = model[1].came
    assert isinstance(came, torch.Tensor)
    return [p.grad for p in model.parameters() if p.grad is not None], came


@pytest.mark.parametrize("form", FORMATS)
def test_gradients_lie_as_the_images_do_and_are_what_they_were(form):
    plain, kept = net(), net()
    preserve_memory_format(kept)
    (expected, _), (found, came) = gradients(plain, form), gradients(kept, form)
    assert came.is_contiguous(memory_format=form)
    assert len(expected) == 2
    torch.testing.assert_close(found, expected)


def test_without_it_torch_turns_them_around():
    _, came = gradients(net(), torch.channels_last)
    assert not came.is_contiguous(memory_format=torch.channels_last)


def test_a_copy_and_a_pickled_one_are_torchs_own_and_work():
    model = net()
    preserve_memory_format(model)
    x = torch.randn(2, 3, 4, 5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[2]) is nn.AdaptiveAvgPool2d
        assert torch.equal(other(x), model(x))


def test_without_gradients_and_without_a_batch_it_averages_as_torch_does():
    model = net()
    preserve_memory_format(model)
    with torch.no_grad():
        assert model[2](torch.ones(3, 4, 5)).shape == (3, 1, 1)
        assert model[2](torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)).shape == (2, 3, 1, 1)
