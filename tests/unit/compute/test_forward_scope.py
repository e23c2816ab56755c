"""Channels-last memory is used inside a model's forward pass in training, and nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncline.compute.convolutions import use_algorithms
from syncline.compute.forward_scope import ForwardScope, keep_dropout_masks
from syncline.compute.kernels.build import why_unavailable
from syncline.compute.pooling import use_pool_algorithms
from syncline.compute.tuning import Algorithms

COMPILED = Algorithms(forward="compiled", input="compiled", weight="compiled")


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


class Recording(nn.Module):
    """Remembers the memory format between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.formats: list[bool] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        between = self.first(x).tanh()
        self.formats.append(is_channels_last(between))
        return {"image": self.second(between), "mean": between.mean()}


@pytest.fixture
def model() -> Recording:
    torch.manual_seed(0)
    model, scope = Recording(), ForwardScope()
    use_algorithms(model, {"first": COMPILED}, scope=scope)
    scope.watch([model])
    return model


IMAGES = torch.randn(2, 3, 9, 9)


def test_images_are_channels_last_inside_and_as_usual_outside(model):
    outputs = model(IMAGES)
    assert model.formats == [True]
    assert outputs["image"].is_contiguous()
    outputs["image"].view(2, -1).sum().backward()
    assert model.first.weight.is_contiguous()
    assert model.first(IMAGES).view(2, -1).shape == (2, 8 * 49), "a layer that the script calls by itself"


@pytest.mark.parametrize("channels", [1, 2])
def test_images_of_one_channel_become_channels_last_too(channels):
    layer, scope = nn.Conv2d(channels, 8, 3), ForwardScope()
    use_algorithms(layer, {}, scope=scope)
    with scope.active(layer):
        assert is_channels_last(layer(torch.randn(2, channels, 9, 9)))


def test_in_evaluation_and_without_gradients_the_layers_are_torchs_own(model):
    usual = copy.deepcopy(model)
    for change in (model.eval, model.train):
        change()
        with torch.no_grad():
            assert torch.equal(model(IMAGES)["image"], usual(IMAGES)["image"])
    assert model.formats == [False, False]


def test_a_model_can_be_copied_and_saved_whole_and_the_file_needs_no_syncline(model, tmp_path):
    usual = model(IMAGES)["image"]
    torch.save(model, tmp_path / "model.pt")
    assert b"syncline" not in (tmp_path / "model.pt").read_bytes()
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        torch.testing.assert_close(other(IMAGES)["image"], usual)
        assert other.formats == [True, False], "a copy computes in ordinary memory"
        assert not other._forward_pre_hooks


def test_hooks_of_the_script_are_copied_and_can_be_removed():
    model, seen = nn.Linear(2, 2), []
    before = model.register_forward_pre_hook(lambda *_: seen.append("before"))
    ForwardScope().watch([model])
    after = model.register_forward_pre_hook(lambda *_: seen.append("after"))
    copy.deepcopy(model)(torch.zeros(1, 2))
    assert seen == ["before", "after"]
    before.remove()
    after.remove()
    model(torch.zeros(1, 2))
    assert seen == ["before", "after"]


def test_after_an_exception_in_a_forward_pass_the_scope_is_left(model):
    with pytest.raises(RuntimeError):
        model(IMAGES[:, :1])
    assert model.first(IMAGES).is_contiguous()
    model(IMAGES)
    assert model.formats == [True]


def test_outputs_and_gradients_are_those_of_the_model_as_it_was(model):
    usual = copy.deepcopy(model)
    for each in (model, usual):
        each(IMAGES)["image"].square().sum().backward()
    for tuned, plain in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(tuned.grad, plain.grad, rtol=1e-4, atol=1e-4)


def test_dropout_drops_the_same_elements_in_every_memory_format():
    layer = nn.Dropout(0.4)
    x = torch.randn(3, 4, 5, 6)
    torch.manual_seed(3)
    usual = layer(x)
    keep_dropout_masks(layer)
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(3)
        assert torch.equal(layer(x.contiguous(memory_format=form)), usual)
    images = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    between = images * 1
    layer(between).flatten(1).sum().backward()
    assert is_channels_last(images.grad)
    assert type(copy.deepcopy(layer)) is nn.Dropout
    assert copy.deepcopy(layer).p == 0.4
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.skipif(bool(why_unavailable()), reason=f"no kernels here: {why_unavailable()}")
def test_second_derivatives_are_those_of_torch():
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 2), nn.Tanh())
    tuned = copy.deepcopy(usual)
    use_algorithms(tuned, {"0": COMPILED, "3": COMPILED})
    use_pool_algorithms(tuned, {"2": COMPILED})
    penalties = []
    for model in (usual, tuned):
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        penalties.append([gradient.detach(), x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*penalties, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
