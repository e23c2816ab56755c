"""The compiled max pooling: what torch gives, to the last bit, also for equal values and for what is no number."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.compute.compare_layers import compare_layers
from syncline.compute.kernels import max_pool
from syncline.compute.kernels.build import why_unavailable
from syncline.compute.pooling import tunable_pools, use_pool_algorithms
from syncline.compute.tuning import Algorithms

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=f"no kernels here: {why_unavailable()}")

COMPILED = Algorithms(forward="compiled")


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def both_ways(layer: nn.MaxPool2d, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradient, torch's and by the kernel."""
    other = copy.deepcopy(layer)
    use_pool_algorithms(other, {"": COMPILED})
    assert type(other) is not nn.MaxPool2d
    results = []
    for each in (layer, other):
        inputs = x.clone(memory_format=torch.preserve_format).requires_grad_()
        output = each(inputs)
        output.backward(channels_last(torch.arange(1.0, output.numel() + 1).view(output.shape)))
        results.append((output.detach(), inputs.grad))
    return results


@settings(max_examples=200)
@given(
    st.integers(1, 3), st.integers(1, 35), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5),
    st.sampled_from(["numbers", "equal ones", "some that are none"]),
)  # fmt: skip
def test_output_and_gradient_are_torchs(samples, channels, height, width, more_rows, more_columns, what):
    torch.manual_seed(channels)
    x = torch.randn(samples, channels, height + more_rows, width + more_columns)
    if what == "equal ones":
        x = x.round()
    elif what == "some that are none":
        x[torch.rand_like(x) < 0.2] = math.nan
    layer = nn.MaxPool2d((height, width))
    assert max_pool.is_applicable(layer, channels_last(x))
    usual, compiled = both_ways(layer, channels_last(x))
    for a, b in zip(usual, compiled, strict=True):
        assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9))


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        pytest.param(nn.MaxPool2d(2), torch.randn(2, 3, 8, 8), id="contiguous memory"),
        pytest.param(nn.MaxPool2d(2), channels_last(torch.randn(2, 3, 8, 8)).double(), id="double precision"),
        pytest.param(nn.MaxPool2d(3, 2), channels_last(torch.randn(2, 3, 8, 8)), id="windows that overlap"),
        pytest.param(nn.MaxPool2d(2, padding=1), channels_last(torch.randn(2, 3, 8, 8)), id="padding"),
        pytest.param(nn.MaxPool2d(2, dilation=2), channels_last(torch.randn(2, 3, 8, 8)), id="gaps"),
        pytest.param(nn.MaxPool2d(2, ceil_mode=True), channels_last(torch.randn(2, 3, 7, 7)), id="windows cut off"),
        pytest.param(nn.MaxPool2d(12), channels_last(torch.randn(2, 3, 24, 24)), id="more places than a byte holds"),
        pytest.param(nn.MaxPool2d(2), torch.randn(3, 8, 8), id="one image by itself"),
        pytest.param(nn.MaxPool2d(2), channels_last(torch.randn(0, 3, 8, 8)), id="no samples"),
    ],
)
def test_what_is_not_for_the_kernel_is_left_to_torch(layer, x):
    assert not max_pool.is_applicable(layer, x)
    expected = layer(x)
    use_pool_algorithms(layer, {"": COMPILED})
    assert torch.equal(layer(x), expected)


def test_indices_that_are_asked_for_are_given():
    layer, x = nn.MaxPool2d(2, return_indices=True), channels_last(torch.randn(2, 3, 8, 8))
    use_pool_algorithms(layer, {"": COMPILED})
    output, indices = layer(x)
    assert output.shape == indices.shape == (2, 3, 4, 4)


def test_layers_change_and_change_back_and_copies_are_torchs_own():
    model = nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2))
    assert [name for name, _ in tunable_pools(model)] == ["0", "2"]
    use_pool_algorithms(model, {"0": COMPILED, "2": Algorithms()})
    assert [type(layer) is nn.MaxPool2d for layer in (model[0], model[2])] == [False, True]
    assert all(type(each[0]) is nn.MaxPool2d for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
    use_pool_algorithms(model, {})
    assert type(model[0]) is nn.MaxPool2d


def test_both_ways_are_timed_where_a_gradient_is_needed():
    model = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.MaxPool2d(2))
    model.to(memory_format=torch.channels_last)
    x = channels_last(torch.randn(2, 3, 20, 20))
    results = compare_layers(model, lambda: model(x), scale=2)
    assert list(results) == ["1", "2"]
    assert 0 < results["2"]["forward", "torch"] < 10
    assert 0 < results["2"]["forward", "compiled"] < 10
    assert results["2"]["weight", "torch"] == 0
    assert results["2"]["forward", "winograd"] == math.inf, "there is no such algorithm"
