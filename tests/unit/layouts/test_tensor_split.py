"""Which layers are divided is a pure function of the model; each number has one owner; copies compute by themselves."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from syncline.comms.collective import Collective, Solo
from syncline.compute.convolutions import use_algorithms
from syncline.compute.tuning import Algorithms
from syncline.errors import ConfigError
from syncline.layouts.divided_model import TensorSplit
from syncline.layouts.tensor_split import row_pieces, split_of
from syncline.layouts.tensor_summary import describe, exchanged_bytes
from syncline.models.zoo import lenet, lstm, transformer
from syncline.models.zoo.resnet import resnet18
from syncline.testing.threads import run_on_threads

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=12)


@given(SHAPES, st.data(), st.integers(1, 7))
def test_every_number_has_exactly_one_owner(shapes, data, size):
    divided = [bool(shape) and shape[0] >= size and data.draw(st.booleans()) for shape in shapes]
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    owned = row_pieces(shapes, divided, size)
    ranges = sorted((low, high) for own in owned for _, low, high in own)
    assert [0, *(high for _, high in ranges)] == [*(low for low, _ in ranges), ends[-1]]
    for own in owned:
        assert own == sorted(own)
        for number, low, high in own:
            assert ends[number] <= low < high <= ends[number + 1]


@given(SHAPES, st.integers(1, 7))
def test_divided_parameters_are_balanced_within_one_row(shapes, size):
    shapes = [shape for shape in shapes if shape and shape[0] >= size]
    owned = row_pieces(shapes, [True] * len(shapes), size)
    for number, shape in enumerate(shapes):
        row = math.prod(shape[1:])
        counts = [sum(high - low for p, low, high in own if p == number) for own in owned]
        assert all(count % row == 0 for count in counts)
        assert max(counts) - min(counts) <= row


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=12), st.integers(1, 7))
def test_whole_parameters_are_balanced_within_one_small_parameter(counts, size):
    owned = row_pieces([(count,) for count in counts], [False] * len(counts), size)
    totals = [sum(high - low for _, low, high in own) for own in owned]
    small = max((count for count in counts if count < 2**16), default=0)
    assert max(totals) - min(totals) <= small + len(counts)  # each large one is cut within one number


def test_64_rows_over_3_workers_are_22_and_21_and_21():
    assert [own[0].high - own[0].low for own in row_pieces([(64, 5)], [True], 3)] == [22 * 5, 21 * 5, 21 * 5]


def layers_of(model: nn.Module, size: int = 2, smallest: int = 1) -> dict[str, str]:
    return {layer.name: layer.kind for layer in split_of(model, size, smallest_numbers=smallest).layers}


def test_the_large_layers_of_the_zoo_are_divided_and_the_small_ones_whole():
    assert list(layers_of(lenet.build((1, 28, 28), 10), smallest=2**14)) == ["2", "5"]
    found = layers_of(resnet18((3, 32, 32), 10, 64, "cifar"), smallest=2**14)
    assert set(found.values()) == {"convolution"}
    assert "stem.0" not in found
    found = layers_of(transformer.build((16,), 65, 65, 128, 2, 4, 0.0), smallest=2**14)
    assert set(found) == {f"blocks.{n}.{name}" for n in (0, 1) for name in ("ask", "gather", "widen", "shrink")}


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_what_may_compute_something_else_is_whole():
    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.warns(FutureWarning):
        old_normed = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "subclass": Doubled(8, 8),
            "replaced": replaced,
            "normed": spectral_norm(nn.Linear(8, 8)),
            "old_normed": old_normed,
            "groups": nn.Conv2d(8, 8, 3, groups=2),
            "sparse": nn.Embedding(8, 8, sparse=True),
            "by_frequency": nn.Embedding(8, 8, scale_grad_by_freq=True),
            "recurrent": nn.LSTM(8, 8),
            "norm": nn.LayerNorm(8),
            "narrow": nn.Linear(8, 1),
        }
    )
    assert layers_of(model) == {"plain": "linear"}


def test_a_convolution_with_other_algorithms_is_divided():
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    use_algorithms(model, {"0": Algorithms(weight="matrices")})
    assert layers_of(model) == {"0": "convolution"}


@pytest.mark.parametrize(
    ("model", "reason", "nearest"),
    [
        (nn.LSTM(8, 8), "nothing-to-divide", "sharded"),
        (nn.Linear(200, 1), "nothing-to-divide", "sharded"),
        (nn.Linear(8, 8), "nothing-to-divide", "sharded"),
        (nn.Sequential(nn.Linear(200, 200), nn.Embedding(9, 9, max_norm=1.0)), "max-norm", "replicated"),
        (torch.compile(nn.Linear(200, 200), backend="eager"), "compiled", "sharded"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(model, reason, nearest):
    with pytest.raises(ConfigError) as caught:
        split_of(model, 2)
    assert (caught.value.code, caught.value.facts["layout"]) == ("layout", "tensor")
    assert (caught.value.facts["reason"], caught.value.facts["nearest"]) == (reason, nearest)


def test_the_refusal_names_the_layers_that_are_too_small():
    with pytest.raises(ConfigError) as caught:
        split_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(200_000, 1)), 2)
    assert (caught.value.facts["too_small"], caught.value.facts["too_few_rows"]) == (["0"], ["1"])


def test_tied_parameters_are_one():
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["tokens"].weight  # type: ignore[assignment]
    split = split_of(model, 2, smallest_numbers=1)
    assert split.divided == {"tokens.weight"}
    assert sum(piece.high - piece.low for rank in (0, 1) for piece in split.pieces(rank)) == 36


def test_copies_and_pickles_of_a_divided_model_compute_by_themselves():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Conv1d(1, 4, 3))
    x, modules = torch.randn(3, 1, 8), list(model)
    expected = model(x)
    split = TensorSplit(model, Solo(), smallest_numbers=1)
    changed = [type(module) for module in model]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in other] == [nn.Linear, nn.ReLU, nn.Conv1d]
        assert torch.equal(other(x), expected)
        assert not [name for module in other for name in vars(module) if "syncline" in name]
    assert repr(model) == repr(other)
    assert torch.equal(model(x), expected)
    split.close()
    assert list(model) == modules
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Conv1d] != changed
    assert torch.equal(model(x), expected)


def test_a_worker_can_compute_samples_of_its_own_in_between():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)), torch.randn(6, 8)
    expected = model(x)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(collective: Collective) -> None:
        model = models[collective.rank]
        split = TensorSplit(model, collective, smallest_numbers=1)
        with split.undivided():
            own = model(x[: 2 + collective.rank])
        together = model(x)
        assert split.bytes_sent > 0
        split.close()
        torch.testing.assert_close(together, expected)
        torch.testing.assert_close(own, expected[: 2 + collective.rank])

    run_on_threads(2, work)


def test_backward_leaves_gradients_of_rows_in_the_leaves_and_none_in_the_parameters():
    model = nn.Sequential(
        nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 12), nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(24, 2)
    )
    split = TensorSplit(model, Solo(), smallest_numbers=30)
    model(torch.randint(9, (5, 3))).sum().backward()
    divided = [leaf.original for leaf in split.leaves]
    assert {name for name, p in model.named_parameters() if not any(p is own for own in divided)} == {
        f"1.norm{number}.{name}" for number in (1, 2) for name in ("weight", "bias")
    }
    for original, low, high, leaf in split.leaves:
        assert original.grad is None
        assert leaf.grad is not None
        assert (low, high, leaf.data_ptr()) == (0, original.numel(), original.data_ptr())
    split.close()


CHANNELS_LAST = torch.channels_last


@pytest.mark.parametrize("format", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize(("channels", "kernel", "dtype"), [(1, 3, torch.float32), (4, 1, torch.float64), (4, 3, None)])
def test_a_convolution_returns_images_in_the_order_of_memory_that_torch_chooses(
    format, weight_format, channels, kernel, dtype
):
    """A dropout that follows draws its numbers in that order."""
    layer = nn.Conv2d(channels, 6, kernel, dtype=dtype).to(memory_format=weight_format)
    x = torch.empty(2, channels, 5, 5, dtype=dtype, memory_format=format).normal_()
    check_same_memory(layer, x)


@pytest.mark.parametrize("batch_first", [False, True])
def test_linear_layers_and_attention_return_the_order_of_memory_that_torch_chooses(batch_first):
    x = torch.randn(3, 5, 8)
    check_same_memory(nn.Linear(8, 6), x.transpose(0, 1))
    check_same_memory(nn.MultiheadAttention(8, 2, batch_first=batch_first), x, x, x)


def check_same_memory(layer: nn.Module, *inputs: torch.Tensor) -> None:
    expected = layer(*inputs)
    split = TensorSplit(layer, Solo(), smallest_numbers=1)
    found = layer(*inputs)
    split.close()
    if isinstance(found, tuple):
        found, expected = found[0], expected[0]
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


def test_a_divided_model_can_be_called_with_other_parameters():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(1, 4, 3), nn.Flatten())
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    x = torch.randn(3, 1, 8)
    expected = functional_call(model, other, x)
    split = TensorSplit(model, Solo(), smallest_numbers=1)
    assert torch.equal(functional_call(model, other, x), expected)
    split.close()


def test_the_description_says_what_is_divided_held_and_exchanged():
    model = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Linear(50, 20))
    split = split_of(model, 2, smallest_numbers=1)
    exchanged = exchanged_bytes(model, split, [torch.zeros(1, 100)])
    assert exchanged == 4 * (100 + 50 + 50 + 20)
    assert model[1].training
    layers, held, sent = describe(split, exchanged)
    assert "0, 2" in layers
    assert "400 B" in layers  # the batch norm
    assert "12.3 kB of 24.7 kB" in held
    assert "880 B" in sent
    many = describe(split_of(nn.Sequential(*(nn.Linear(9, 9) for _ in range(9))), 2, smallest_numbers=1))
    assert "0, 1, 2, 3, 4 and 4 more" in many[0]


@pytest.mark.parametrize(("heads", "dropout", "copies"), [(2, 0.0, 10), (1, 0.0, 6), (2, 0.1, 6)])
def test_dividing_the_heads_of_an_attention_costs_more_exchange(heads, dropout, copies):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, heads, 1, dropout), 1, enable_nested_tensor=False)
    split = split_of(model, 2, smallest_numbers=100)
    assert [layer.kind for layer in split.layers] == ["attention"]
    assert exchanged_bytes(model, split, [torch.zeros(5, 1, 8)]) == copies * 5 * 8 * 4


def test_the_description_needs_no_memory_for_the_model():
    with torch.device("meta"):
        model = lstm.build((16,), 65, 65, 256, 1)
        inputs = [torch.zeros(1, 16, dtype=torch.int64)]
    split = split_of(model, 2)
    assert exchanged_bytes(model, split, inputs) == 4 * 16 * (256 + 65)
