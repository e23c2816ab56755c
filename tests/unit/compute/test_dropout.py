"""Dropout by sample: the same elements for every division, through every way to call it, and when recomputed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from syncline.compute.dropout import Dropouts, sample_axis
from syncline.compute.recompute import recompute_activations
from syncline.errors import ConfigError
from syncline.models.layers import DropPath

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
Function = Callable[[torch.Tensor], torch.Tensor]
OF_SAMPLES: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "layer": nn.Dropout(0.4),
    "channels": lambda x: F.dropout1d(x, 0.4),
    "channels in place": lambda x: F.dropout1d(x.clone(), 0.4, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha in place": lambda x: F.alpha_dropout(x.clone(), 0.4, training=True, inplace=True),
    "alpha channels": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "path": DropPath(0.4),
}


def in_parts(
    run: Callable[[int, int], torch.Tensor], samples: Sequence[int], parts: Sequence[int]
) -> list[torch.Tensor]:
    """What `run(low, high)` returns for each part of the samples, all in one step."""
    edges = list(itertools.accumulate(parts, initial=0))
    dropouts, results = Dropouts(seed=5), []
    for low, high in itertools.pairwise(edges):
        with dropouts.of(3, np.array(samples[low:high])):
            results.append(run(low, high))
    return results


@st.composite
def divisions(draw: Any) -> tuple[list[int], list[int]]:
    parts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    samples = draw(st.lists(st.integers(0, 2**62), min_size=sum(parts), max_size=sum(parts), unique=True))
    return samples, parts


@pytest.mark.parametrize("name", OF_SAMPLES)
@given(divisions(), st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 70))
def test_a_sample_loses_the_same_elements_in_every_division(name, division, dtype, channels, length):
    samples, parts = division
    x = torch.ones(len(samples), channels, length, dtype=dtype)
    whole = in_parts(lambda low, high: OF_SAMPLES[name](x[low:high]), samples, [len(samples)])
    divided = in_parts(lambda low, high: OF_SAMPLES[name](x[low:high]), samples, parts)
    assert torch.equal(torch.cat(divided), whole[0])


@given(divisions(), st.integers(1, 9), st.integers(1, 70))
def test_sequence_first_is_by_sample_too(division, time, width):
    samples, parts = division
    assume(time not in (*parts, len(samples)))
    x = torch.ones(time, len(samples), width)
    whole = in_parts(lambda low, high: F.dropout(x[:, low:high], 0.4), samples, [len(samples)])
    divided = in_parts(lambda low, high: F.dropout(x[:, low:high], 0.4), samples, parts)
    assert torch.equal(torch.cat(divided, dim=1), whole[0])


@given(divisions(), st.integers(2, 9), st.integers(1, 70))
def test_consecutive_rows_are_of_one_sample(division, rows, width):
    samples, parts = division
    assume(width not in (*parts, len(samples)))
    x = torch.ones(len(samples) * rows, width)
    run = lambda low, high: F.dropout(x[low * rows : high * rows], 0.4)  # noqa: E731
    assert torch.equal(torch.cat(in_parts(run, samples, parts)), in_parts(run, samples, [len(samples)])[0])


@pytest.mark.parametrize(("shape", "samples", "axis"), [
    ((4, 7), 4, 0), ((7, 4, 3), 4, 1), ((8, 4, 3), 4, 1), ((8, 3), 4, 0), ((4, 4), 4, 0), ((7, 3), 4, None),
    ((), 4, None), ((5, 3), 0, None), ((7,), 4, None), ((8,), 4, 0),
])  # fmt: skip
def test_the_shape_tells_which_dimension_is_that_of_the_samples(shape, samples, axis):
    assert sample_axis(shape, samples) == axis


def test_weights_belong_to_no_sample():
    weight = nn.Parameter(torch.ones(4, 50))
    dropouts, results = Dropouts(1), []
    for samples in ([1, 2, 3, 4], [7, 8], [9]):
        with dropouts.of(0, samples):
            results.append(F.dropout(weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_masks_differ_by_seed_step_call_and_sample():
    x, seen = torch.ones(1, 200), []
    for seed, step, sample, first_call in itertools.product((0, 1), (0, 1), (0, 1), (0, 1)):
        with Dropouts(seed).of(step, [sample], first_call):
            seen.append(tuple(F.dropout(x)[0].tolist()))
    assert len(set(seen)) == len(seen)


def test_a_part_of_a_model_begins_with_the_number_of_calls_before_it():
    x, dropouts = torch.ones(3, 40), Dropouts(0)
    with dropouts.of(0, [1, 2, 3]) as whole:
        calls = [F.dropout(x) for _ in range(5)]
    with dropouts.of(0, [1, 2, 3], first_call=2) as part:
        assert torch.equal(F.dropout(x), calls[2])
        assert torch.equal(F.dropout(x), calls[3])
    assert (whole.calls, part.calls) == (5, 2)


@pytest.mark.parametrize("name", ["dropout", "in place", "alpha"])
def test_the_memory_format_does_not_matter(name):
    function = OF_SAMPLES[name]
    x = torch.rand(3, 5, 4, 6) + 1
    dropouts, results = Dropouts(0), []
    wide = torch.zeros(3, 5, 4, 12)
    wide[..., ::2] = x
    channels_last = x.contiguous(memory_format=torch.channels_last)
    for laid_out in (x, channels_last, wide[..., ::2], x.transpose(1, 3).contiguous().transpose(1, 3)):
        with dropouts.of(0, [4, 5, 6]):
            results.append(function(laid_out))
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[1].is_contiguous(memory_format=torch.channels_last)


def test_nothing_changes_outside_of_a_forward_pass_and_in_evaluation():
    x, dropouts = torch.randn(6, 8), Dropouts(0)
    torch.manual_seed(3)
    noise = torch.empty_like(x).bernoulli_(0.6).div_(0.6)
    with dropouts.of(0, range(6)) as scope:
        F.dropout(x, 0.5)
        before = torch.get_rng_state()
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(torch.get_rng_state(), before)
        assert scope.calls == 1
    torch.manual_seed(3)
    assert torch.equal(F.dropout(x, 0.4), x * noise)


@pytest.mark.parametrize("name", ["dropout", "in place", "channels", "alpha"])
@pytest.mark.parametrize("shape", [(3, 7, 1), (7, 3, 2), (6, 5, 1)])
def test_gradients_are_exact(name, shape):
    dropouts = Dropouts(0)

    def run(x: torch.Tensor) -> torch.Tensor:
        with dropouts.of(0, [7, 8, 9]):
            return OF_SAMPLES[name](x)

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_the_dropout_of_attention_is_by_sample():
    x = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    values = torch.eye(5).expand(6, 2, 5, 5)  # so that the output is the weights, dropped

    def run(low: int, high: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(x[low:high], x[low:high], values[low:high], dropout_p=0.4)

    whole = in_parts(run, range(6), [6])[0]
    assert 0.2 < float((whole == 0).float().mean()) < 0.6
    for parts in ([3, 3], [1, 2, 3]):
        divided = torch.cat(in_parts(run, range(6), parts))
        assert torch.equal(divided == 0, whole == 0)
        torch.testing.assert_close(divided, whole)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}, {"bias": False}])
def test_recurrent_layers_drop_by_sample_between_their_layers(kind, options):
    torch.manual_seed(0)
    layers = kind(5, 4, num_layers=3, dropout=0.5, **options).double()
    x = torch.randn(6, 7, 5).double()
    axis = 0 if options.get("batch_first") else 1
    x = x if axis == 0 else x.transpose(0, 1)
    run = lambda low, high: layers(x.narrow(axis, low, high - low))[0]  # noqa: E731
    whole = in_parts(run, range(6), [6])[0]
    for parts in ([3, 3], [1, 2, 3], [1] * 6):
        torch.testing.assert_close(torch.cat(in_parts(run, range(6), parts), dim=axis), whole)
    layers.dropout = 1e-12  # so that nothing is dropped
    with Dropouts(0).of(0, range(6)) as scope:
        by_layer = layers(x)
    assert scope.calls == 2
    assert not torch.allclose(by_layer[0], whole)
    torch.testing.assert_close(by_layer, layers(x))


def test_a_user_is_told_once_what_torch_draws():
    told: list[str] = []
    dropouts = Dropouts(0, told.append)
    layers = nn.LSTM(5, 4, num_layers=2, dropout=0.5)
    for step in range(2):
        with dropouts.of(step, range(3)):
            layers(pack_padded_sequence(torch.randn(7, 3, 5), [7, 4, 2]))
    assert len(told) == 1


def attentive(width: int = 8) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 16, dropout=0.3, batch_first=True)


def test_a_transformer_layer_does_not_depend_on_the_division():
    torch.manual_seed(0)
    layer, x = attentive(), torch.randn(6, 5, 8)
    whole = in_parts(lambda low, high: layer(x[low:high]), range(6), [6])[0]
    for parts in ([3, 3], [1, 2, 3]):
        torch.testing.assert_close(torch.cat(in_parts(lambda low, high: layer(x[low:high]), range(6), parts)), whole)
    with Dropouts(0).of(0, range(6)) as scope:
        layer(x)
    assert scope.calls == 4


LAYERS = {
    "encoder": lambda x: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)(x),
    "decoder": lambda x: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3)(x, x),
    "attention": lambda x: nn.MultiheadAttention(8, 2, dropout=0.3)(x, x, x)[0],
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("time", [2, 4, 8])
def test_sequence_first_layers_of_torch_are_by_sample_even_if_time_is_as_long_as_the_batch(name, time):
    x = torch.randn(time, 4, 8, generator=torch.Generator().manual_seed(0))

    def run(low: int, high: int) -> torch.Tensor:
        torch.manual_seed(0)  # for the same weights
        return LAYERS[name](x[:, low:high])

    whole = in_parts(run, range(4), [4])[0]
    for parts in ([2, 2], [1, 3]):
        torch.testing.assert_close(torch.cat(in_parts(run, range(4), parts), dim=1), whole)


def gradients(model: nn.Module, run: Function, parts: int = 2) -> list[torch.Tensor]:
    """Of two micro-batches, the backward passes after both forward passes."""
    torch.manual_seed(0)
    model.zero_grad()
    x, dropouts = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)), Dropouts(9)
    outputs = []
    for k in range(parts):
        with dropouts.of(4, range(k * 6 // parts, (k + 1) * 6 // parts)):
            outputs.append(run(x[k * 6 // parts : (k + 1) * 6 // parts].clone().requires_grad_()))
    for output in outputs:
        output.square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_is_recomputed_in_the_backward_pass_drops_the_same(is_reentrant):
    torch.manual_seed(0)
    model = nn.ModuleList([attentive(), nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True), nn.Dropout(0.5)])

    def run(x: torch.Tensor) -> torch.Tensor:
        return model[2](model[1](model[0](x) + torch.rand(1))[0])

    again = gradients(model, lambda x: checkpoint(run, x, use_reentrant=is_reentrant))
    for mine, expected in zip(again, gradients(model, run), strict=True):
        torch.testing.assert_close(mine, expected)


def test_blocks_that_syncline_recomputes_have_the_same_bits():
    torch.manual_seed(0)
    plain = nn.Sequential(attentive(), attentive(), nn.Dropout(0.2))
    recomputing = copy.deepcopy(plain)
    assert recompute_activations(recomputing) == 2
    expected, actual = gradients(plain, plain), gradients(recomputing, recomputing)
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def test_a_model_that_seeds_the_generator_is_not_recomputed_with_other_masks():
    model = nn.Linear(8, 8)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch.manual_seed(1)
            x = F.dropout(model(x))
        return x

    with pytest.raises(ConfigError) as caught:
        gradients(model, lambda x: checkpoint(run, x, use_reentrant=False))
    assert caught.value.code == "dropout-seed"
