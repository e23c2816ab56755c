"""Convolutions with weight gradients by matrices: the same values as torch's, and nothing else is different."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.workers.compare_convolutions import compare_convolutions
from syncline.workers.convolutions import (
    by_matrices,
    candidates,
    gradient_by_matrices,
    gradient_by_torch,
    suits,
)

FORMATS = [torch.contiguous_format, torch.channels_last]


@st.composite
def layers_with_inputs(draw: st.DrawFn) -> tuple[nn.Conv2d, torch.Tensor]:
    """Any plain convolution, and images that are large enough for it."""
    small = st.integers(1, 3)
    kernel = (draw(small), draw(small))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    sides = [gap * (side - 1) + 1 + draw(st.integers(0, 4)) for side, gap in zip(kernel, dilation, strict=True)]
    torch.manual_seed(draw(st.integers(0, 9)))
    layer = nn.Conv2d(
        draw(small), draw(small), kernel, (draw(small), draw(small)), padding, dilation, bias=draw(st.booleans())
    )
    form = draw(st.sampled_from(FORMATS))
    x = torch.randn(draw(small), layer.in_channels, *sides).contiguous(memory_format=form)
    return layer.to(memory_format=form), x


@given(layers_with_inputs())
def test_the_product_of_matrices_is_the_gradient_that_torch_computes(given):
    layer, x = given
    dy = torch.randn_like(layer(x))
    torch.testing.assert_close(
        gradient_by_matrices(layer, x, dy), gradient_by_torch(layer, x, dy), rtol=1e-4, atol=1e-4
    )


@given(layers_with_inputs(), st.booleans())
def test_a_layer_by_matrices_has_the_outputs_and_gradients_of_torchs_own(given, needs_x):
    layer, x = given
    other = copy.deepcopy(layer)
    by_matrices(other, [""])
    assert type(other) is not nn.Conv2d
    results = []
    for each in (layer, other):
        inputs = x.clone().requires_grad_(needs_x)
        output = each(inputs)
        output.square().sum().backward()
        results.append((output.detach(), inputs.grad, *(p.grad for p in each.parameters())))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 2, 1),
    )


def test_only_plain_convolutions_can_be_computed_by_matrices():
    assert [name for name, _ in candidates(network())] == ["0", "5"]


def test_layers_change_and_change_back_and_keep_what_they_have():
    model = network()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    by_matrices(model, ["0"])
    model(torch.randn(2, 3, 9, 9))
    assert [type(layer) is nn.Conv2d for layer in (model[0], model[5])] == [False, True]
    assert isinstance(model[0], nn.Conv2d)
    assert seen == [1]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    by_matrices(model, ["5"])
    assert [type(layer) is nn.Conv2d for layer in (model[0], model[5])] == [True, False]
    by_matrices(model, [])
    assert type(model[5]) is nn.Conv2d


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_torchs_own_layer(copied):
    layer = nn.Conv2d(3, 4, 3)
    by_matrices(layer, [""])
    other = copied(layer)
    assert type(other) is nn.Conv2d
    assert torch.equal(other.weight, layer.weight)
    x = torch.randn(1, 3, 5, 5)
    assert torch.equal(other(x), layer(x))


def test_where_it_makes_no_sense_a_layer_computes_as_torch_does():
    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 8, 8)
    assert suits(layer, x)
    assert not suits(layer, x.double())
    assert not suits(layer, x[0])
    assert not suits(layer, torch.empty(1, 3, 2000, 2000))
    with torch.no_grad():
        assert not suits(layer, x)
    by_matrices(layer, [""])
    with torch.autocast("cpu", torch.bfloat16):
        assert not suits(layer, x)
        output = layer(x)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer(x[0]).shape == (4, 8, 8)


def test_each_kind_of_layer_is_timed_once_with_the_samples_of_training(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1))
    timed = []

    def watched(layer, x, dy):
        timed.append((layer, tuple(x.shape)))
        return gradient_by_matrices(layer, x, dy)

    monkeypatch.setattr("syncline.workers.compare_convolutions.gradient_by_matrices", watched)
    told = compare_convolutions(model, lambda: model(torch.randn(2, 3, 6, 6)), scale=4)
    assert list(told) == ["0", "1", "2"]
    assert all(0 < seconds < 10 for pair in told.values() for seconds in pair)
    assert told["0"] == told["1"]
    assert set(timed) == {(model[0], (8, 3, 6, 6)), (model[2], (8, 3, 6, 6))}
    assert not model[0]._forward_pre_hooks


def test_a_layer_that_would_need_too_much_memory_is_not_timed():
    model = nn.Conv2d(3, 3, 3)
    ((by_torch, by_matrices_s),) = compare_convolutions(
        model, lambda: model(torch.randn(1, 3, 64, 64)), scale=1000
    ).values()
    assert by_torch == by_matrices_s == math.inf
