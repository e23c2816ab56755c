"""Convolutions in other ways than torch's: the same values as torch's, and nothing else is different."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.compute import compare_layers as comparing
from syncline.compute.compare_layers import compare_layers
from syncline.compute.convolutions import is_applicable, run_pass, supports, tunable_convolutions, use_algorithms
from syncline.compute.kernels.build import library
from syncline.compute.tuning import PASSES, Algorithms

BY_MATRICES = Algorithms(weight="matrices")
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
def test_each_pass_is_the_same_in_every_way(given):
    layer, x = given
    dy = torch.randn_like(layer(x))
    with torch.no_grad():
        for which, algorithms in PASSES:
            usual = run_pass(layer, which, "torch", x, dy)
            for algorithm in algorithms:
                if supports(layer, x, which, algorithm):
                    torch.testing.assert_close(run_pass(layer, which, algorithm, x, dy), usual, rtol=1e-4, atol=1e-4)


WAYS = [
    Algorithms(weight="matrices"),
    Algorithms(forward="compiled"),
    Algorithms(input="compiled"),
    Algorithms(weight="compiled"),
    Algorithms(forward="compiled", input="compiled", weight="compiled"),
    Algorithms(forward="winograd", input="winograd", weight="winograd"),
]


@given(layers_with_inputs(), st.sampled_from(WAYS), st.booleans(), st.booleans())
def test_a_layer_in_other_ways_has_the_outputs_and_gradients_of_torchs_own(given, algorithms, needs_x, needs_weight):
    layer, x = given
    layer.weight.requires_grad_(needs_weight)
    other = copy.deepcopy(layer)
    use_algorithms(other, {"": algorithms})
    assert type(other) is not nn.Conv2d
    results = []
    for each in (layer, other):
        inputs = x.clone().requires_grad_(needs_x)
        output = each(inputs)
        if output.requires_grad:
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


def test_only_plain_convolutions_have_a_choice():
    assert [name for name, _ in tunable_convolutions(network())] == ["0", "5"]


def test_layers_change_and_change_back_and_keep_what_they_have():
    model = network()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    use_algorithms(model, {"0": BY_MATRICES})
    model(torch.randn(2, 3, 9, 9))
    assert [type(layer) is nn.Conv2d for layer in (model[0], model[5])] == [False, True]
    assert isinstance(model[0], nn.Conv2d)
    assert seen == [1]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    use_algorithms(model, {"5": BY_MATRICES})
    assert [type(layer) is nn.Conv2d for layer in (model[0], model[5])] == [True, False]
    use_algorithms(model, {})
    assert type(model[5]) is nn.Conv2d


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_torchs_own_layer(copied):
    layer = nn.Conv2d(3, 4, 3)
    use_algorithms(layer, {"": BY_MATRICES})
    other = copied(layer)
    assert type(other) is nn.Conv2d
    assert torch.equal(other.weight, layer.weight)
    x = torch.randn(1, 3, 5, 5)
    assert torch.equal(other(x), layer(x))
    assert vars(other).keys() == vars(nn.Conv2d(3, 4, 3)).keys()


def test_where_it_makes_no_sense_a_layer_computes_as_torch_does():
    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 8, 8)
    assert is_applicable(layer, x)
    assert not is_applicable(layer, x.double())
    assert not is_applicable(layer, x[0])
    assert supports(layer, x, "weight", "matrices")
    assert not supports(layer, torch.empty(1, 3, 2000, 2000), "weight", "matrices")
    assert not supports(layer, x, "weight", "matrices", samples=100_000)
    assert not supports(layer, x, "weight", "compiled"), "it is contiguous"
    with torch.no_grad():
        assert not is_applicable(layer, x)
    use_algorithms(layer, {"": BY_MATRICES})
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_applicable(layer, x)
        output = layer(x)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer(x[0]).shape == (4, 8, 8)


def test_without_kernels_a_layer_computes_as_torch_does(monkeypatch):
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = layer(x)
    use_algorithms(layer, {"": Algorithms(forward="compiled", input="compiled", weight="compiled")})
    monkeypatch.setattr("syncline.compute.kernels.convolve.library", lambda: None)
    output = layer(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("images", [torch.randn(2, 5, 8, 8), torch.randn(2, 3, 2, 2)])
def test_images_that_do_not_fit_the_layer_are_complained_about_by_torch(images):
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    use_algorithms(layer, {"": Algorithms(forward="compiled")})
    with pytest.raises(RuntimeError, match=r"expected input|Kernel size"):
        layer(images.contiguous(memory_format=torch.channels_last))


def test_each_kind_of_layer_is_timed_once_with_the_samples_of_training(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1))
    timed = []

    def watched(layer, which, algorithm, x, dy):
        timed.append((layer, tuple(x.shape)))
        return run_pass(layer, which, algorithm, x, dy)

    monkeypatch.setattr(comparing, "run_pass", watched)
    images = torch.randn(2, 3, 6, 6, requires_grad=True)
    times = compare_layers(model, lambda: model(images), scale=4)
    assert list(times) == ["0", "1", "2"]
    assert all(0 < of_layer[which, "torch"] < 10 for of_layer in times.values() for which, _ in PASSES)
    assert all(0 < of_layer["weight", "matrices"] < 10 for of_layer in times.values())
    assert times["0"] == times["1"]
    assert set(timed) == {(model[0], (8, 3, 6, 6)), (model[2], (8, 3, 6, 6))}
    assert not model[0]._forward_pre_hooks


def test_layers_that_take_longest_come_first_and_those_not_reached_stay_as_they_are(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr(comparing, "time", clock)
    monkeypatch.setattr(comparing, "_LONGEST_S", 2)  # one look at the clock for the limit, and one for each kind
    images = torch.randn(2, 3, 6, 6, requires_grad=True)
    times = compare_layers(model, lambda: model(images), scale=1)
    assert list(times) == ["0", "1", "2"]
    assert times["1"] == times["2"]
    assert times["1"]["forward", "torch"] < math.inf
    assert set(times["0"].values()) == {math.inf}


@pytest.mark.parametrize(("side", "samples"), [(64, 32), (8, 32), (4, 128)])
def test_part_of_the_samples_is_enough_unless_that_leaves_few_pixels(monkeypatch, side, samples):
    monkeypatch.setattr(comparing, "_PASS_S", 0.0)
    x, dy = comparing._representative_inputs(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, side, side), 128)
    assert x.shape[0] == dy.shape[0] == samples


def test_compiled_code_is_timed_where_images_are_channels_last():
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6)
    for images, is_there in ((x.contiguous(memory_format=torch.channels_last), library() is not None), (x, False)):
        (times,) = compare_layers(layer, lambda images=images: layer(images), scale=1).values()
        assert (times["forward", "compiled"] < math.inf) == is_there
        assert times["input", "torch"] == times["input", "compiled"] == 0, "the gradient of the images is not needed"


def test_an_algorithm_whose_result_differs_is_excluded(monkeypatch):
    layer = nn.Conv2d(3, 4, 3)

    def wrong(layer, which, algorithm, x, dy):
        return run_pass(layer, which, algorithm, x, dy) + (algorithm == "matrices")

    monkeypatch.setattr(comparing, "run_pass", wrong)
    (times,) = compare_layers(layer, lambda: layer(torch.randn(2, 3, 6, 6)), scale=1).values()
    assert times["weight", "matrices"] == math.inf > times["weight", "torch"]


def test_patches_that_would_need_too_much_memory_are_not_materialized():
    layer = nn.Conv2d(3, 3, 3)
    (times,) = compare_layers(layer, lambda: layer(torch.randn(1, 3, 64, 64)), scale=1000).values()
    assert times["weight", "matrices"] == math.inf > times["weight", "torch"]


def test_a_layer_with_many_samples_is_timed_with_a_part_of_them(monkeypatch):
    monkeypatch.setattr(comparing, "_MOST_BYTES", 10 * 4 * (3 * 36 + 4 * 16))
    sizes = set()

    def watched(layer, which, algorithm, x, dy):
        sizes.add(x.shape[0])
        return run_pass(layer, which, algorithm, x, dy)

    monkeypatch.setattr(comparing, "run_pass", watched)
    layer = nn.Conv2d(3, 4, 3)
    compare_layers(layer, lambda: layer(torch.randn(2, 3, 6, 6)), scale=100)
    assert sizes == {10}
