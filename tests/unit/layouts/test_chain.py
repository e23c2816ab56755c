"""The stages of a chain, one after another, are the model: to the bit, forward and backward, with any batch size."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline
from syncline.compute.partition import split
from syncline.compute.recompute import recompute_activations
from syncline.layouts.chain.chain import Chain
from syncline.layouts.chain.parts import leaves_of
from syncline.layouts.chain.program import received
from syncline.layouts.chain.tracing import trace_chain
from syncline.models import zoo

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("one_thread")]


def images(samples: int, shape: Sequence[int] = (3, 16, 16)) -> tuple[Tensor, ...]:
    return (torch.randn(samples, *shape, generator=torch.Generator().manual_seed(samples)),)


def tokens(samples: int) -> tuple[Tensor, ...]:
    return (torch.randint(12, (samples, 6), generator=torch.Generator().manual_seed(samples)),)


def vectors(samples: int) -> tuple[Tensor, ...]:
    return images(samples, (6,))


class Residual(nn.Module):
    """Functions, skip connections, an input that is used late, and shapes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.full((6,), 0.1))
        self.fixed = torch.linspace(0, 1, 6)  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        batch, width = x.shape
        early = functional.relu(self.first(x))
        late = functional.dropout(self.second(early) + early * x, 0.3, self.training) * self.scale + self.shift
        with torch.no_grad():
            weight = late.mean(1, keepdim=True).expand(len(x), width)
        joined = torch.cat([late * weight, x - self.fixed], dim=1).view(batch * 2, width).reshape(batch, -1)
        places = torch.arange(batch * 12, device=x.device).view(batch, 12)
        return self.third(joined + places / 100)[:batch]


class Tied(nn.Module):
    """The same weights at both ends, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        states = self.mix(torch.tanh(self.mix(self.embed(x))))
        return {"scores": self.out(states).transpose(1, 2), "states": states}


class InPlace(nn.Module):
    """Activations in place, of a tensor that has a second user."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y += x
        seen = y.view(-1, 2, 3)
        self.relu(y)
        return self.last(y + seen.flatten(1))


class OnlyInTraining(nn.Module):
    """A head, and noise, that evaluation does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            y = self.extra(y + 0.1 * torch.randn_like(y))
        return self.last(y)


class EndsInTraining(nn.Module):
    """Layers at both ends that evaluation does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.second(self.first(x) if self.training else x))
        return self.last(y) if self.training else y


class Sign(torch.autograd.Function):
    """Forward is the sign, backward lets gradients pass."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class OwnFunction(nn.Module):
    """An autograd function between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Sign.apply(self.first(x)))


class TwoInputs(nn.Module):
    """Two inputs, one of them for the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor, late: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.last(y, late), y


class NamesItsUnits(nn.Module):
    """Branches on values, and says where it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.end = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.begin(x)) if bool(torch.isfinite(x).all()) else self.end(self.begin(torch.zeros_like(x)))

    def pipeline_units(self) -> list[nn.Module]:
        return [self.begin, self.end]


def declared() -> nn.Module:
    layers = [
        {"layer": "conv2d(4, 3, padding=1)", "name": "first"},
        "relu",
        {"layer": "conv2d(4, 3, padding=1)", "name": "second"},
        {"layer": "add", "from": ["first", "second"]},
        "flatten",
        {"layer": "linear(4)"},
    ]
    return syncline.declared(layers).build((3, 16, 16), 4)


def recomputed(model: nn.Module) -> nn.Module:
    assert recompute_activations(model)
    return model


def gpt2(**options: object) -> nn.Module:
    return zoo.build("hf:gpt2", (6,), 12, 12, n_layer=3, n_embd=8, n_head=2, **options)


def plain_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 12, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def chain_of_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(),
        nn.Linear(8, 8), nn.Dropout(0.2, inplace=True), nn.Linear(8, 4),
    )  # fmt: skip


SMALL = {
    "alexnet": {"hidden": 8}, "vgg11": {"hidden": 8}, "resnet18": {"width": 2}, "resnet34": {"width": 2},
    "resnet50": {"width": 2}, "transformer": {"width": 8, "heads": 2, "layers": 2},
    "autoencoder": {"hidden": (16, 8)}, "stacked-autoencoder": {"hidden": (16, 8)},
}  # fmt: skip


def of_the_zoo(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]:
    options = SMALL.get(name, {})
    if zoo.card(name).takes == "tokens":
        return lambda: zoo.build(name, (6,), 12, 12, **options), tokens
    shape = (3, 8, 8) if name == "googlenet" else (3, 15, 15)  # as small as they can be
    return lambda: zoo.build(name, shape, 4, None, **options), lambda samples: images(samples, shape)


MODELS = {
    **{name: of_the_zoo(name) for name in zoo.names() if zoo.card(name).learns_by == "gradients"},
    "lstm for tokens": (lambda: zoo.build("lstm", (6,), 12, 12, hidden=8), tokens),
    "gpt2": (gpt2, tokens),
    "gpt2 with its own output": (plain_gpt2, tokens),
    "residuals": (Residual, vectors),
    "tied weights": (Tied, tokens),
    "in place": (InPlace, vectors),
    "training differs": (OnlyInTraining, vectors),
    "training has other ends": (EndsInTraining, vectors),
    "an autograd function": (OwnFunction, vectors),
    "two inputs": (TwoInputs, lambda samples: (*vectors(samples), *vectors(samples))),
    "names its units": (NamesItsUnits, vectors),
    "declared": (declared, images),
    "torch's transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2),
        lambda samples: images(samples, (5, 6)),
    ),
    "recomputed chain": (lambda: recomputed(chain_of_layers()), vectors),
    "recomputed resnet": (lambda: recomputed(zoo.build("resnet18", (3, 16, 16), 4, width=2)), images),
    "recomputed gpt2": (lambda: recomputed(gpt2()), tokens),
}


def loss_of(output: object) -> Tensor:
    values = [t for t in leaves_of(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in values)


def results(model: nn.Module, output: object) -> dict[str, object]:
    found = {f"output {n}": t for n, t in enumerate(leaves_of(output))}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers()} | {"random": torch.rand(1)}


def in_one(model: nn.Module, inputs: Sequence[Tensor]) -> dict[str, object]:
    torch.manual_seed(3)
    output = model(*inputs)
    loss_of(output).backward()
    return results(model, output)


def in_stages(chain: Chain, inputs: Sequence[Tensor], edges: Sequence[int]) -> dict[str, object]:
    """As a pipeline does it: each stage on copies, then backward from the last one to the first."""
    torch.manual_seed(3)
    stages = [chain.stage(low, high) for low, high in itertools.pairwise(edges)]
    taken, given = [tuple(inputs)], []
    for stage in stages:
        given.append(stage(*taken[-1]))
        if not stage.is_last:
            taken.append(received(chain.crossing(stage.high, training=chain.model.training), given[-1]))
    (output,) = given[-1]
    loss_of(output).backward()
    for ends, copies in reversed(list(zip(given[:-1], taken[1:], strict=True))):
        pairs = [(end, c.grad) for end, c in zip(ends, copies, strict=True) if end.requires_grad and c.grad is not None]
        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])
    return results(chain.model, output)


def assert_same(expected: dict[str, object], found: dict[str, object]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert value == found[name], name


def assert_complete(chain: Chain) -> None:
    """All parameters and buffers, themselves, are in units, under the names that they have in the model."""
    parameters = {name: id(p) for unit in chain.units for name, p in unit.parameters.items()}
    buffers = {name: id(b) for unit in chain.units for name, b in unit.buffers.items()}
    assert parameters == {name: id(p) for name, p in chain.model.named_parameters()}
    assert buffers == {name: id(b) for name, b in chain.model.named_buffers()}
    assert len({unit.name for unit in chain.units}) == len(chain)


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_the_model_to_the_bit(name: str) -> None:
    build, data = MODELS[name]
    model = build()
    with_stages = copy.deepcopy(model)
    chain = trace_chain(with_stages, data(4))
    assert len(chain) > 1
    assert all(p.grad is None for p in with_stages.parameters())
    assert_same(dict(model.state_dict()), dict(with_stages.state_dict()))
    assert_complete(chain)
    for mode, samples, count in ((True, 4, len(chain)), (True, 7, 2), (False, 1, min(3, len(chain)))):
        edges = [0, *(high for _, high in split(len(chain), count))]
        for each in (model, with_stages):
            each.train(mode).zero_grad()
        assert_same(in_one(model, data(samples)), in_stages(chain, data(samples), edges))


def test_tied_weights_are_in_every_unit_that_uses_them() -> None:
    chain = trace_chain(Tied(), tokens(2))
    assert [(unit.name, list(unit.parameters)) for unit in chain.units] == [
        ("embed", ["embed.weight"]),
        ("mix", ["mix.weight", "mix.bias"]),
        ("mix:2", ["mix.weight", "mix.bias"]),
        ("out", ["embed.weight"]),
    ]
    last = chain.stage(2, 4)
    assert [name for name, _ in last.named_parameters()] == ["embed.weight", "mix.weight", "mix.bias"]
    assert last.is_last
    assert not list(last.buffers())


def test_blocks_are_units_and_have_the_names_of_the_model() -> None:
    names = [unit.name for unit in trace_chain(gpt2(), tokens(2)).units]
    assert [name for name in names if ".h." in name] == [f"model.transformer.h.{n}" for n in range(3)]
    resnet = zoo.build("resnet18", (3, 8, 8), 4, width=2)
    assert "stage2.0" in [unit.name for unit in trace_chain(resnet, images(2, (3, 8, 8))).units]


def test_positions_and_shapes_do_not_cross_but_tensors_do() -> None:
    chain = trace_chain(Residual(), vectors(2))
    shapes = [[c.shape(5) for c in chain.crossing(n)] for n in range(len(chain))]
    assert [unit.name for unit in chain.units] == ["first", "second", "scale", "third"]
    assert shapes[1] == [(5, 6), (5, 6)]  # the input, which is used late, and the output of the first layer
    assert all(c.dtype == torch.float32 for n in range(len(chain)) for c in chain.crossing(n))
    assert [c.requires_grad for c in chain.crossing(1)] == [False, True]
    assert chain.crossing(1)[0].bytes(5) == 5 * 6 * 4


def test_a_tensor_is_not_cut_off_from_what_changes_it_in_place() -> None:
    assert [unit.name for unit in trace_chain(InPlace(), vectors(2)).units] == ["first", "norm", "last"]
    units = trace_chain(chain_of_layers(), vectors(2)).units
    assert [unit.name for unit in units] == ["0", "1", "3", "4", "5", "6", "8"]


def test_a_stage_sees_hooks_and_moved_parameters() -> None:
    model = chain_of_layers()
    called = []
    model[4].register_forward_hook(lambda *_: called.append("hook"))
    plain = model[6].forward
    model[6].forward = lambda x: (called.append("forward"), plain(x))[1]
    chain = trace_chain(model, vectors(2))
    called.clear()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    (output,) = chain.stage(0, len(chain))(*vectors(3))
    assert called == ["hook", "forward"]
    assert not output.any()


def test_evaluation_and_training_follow_the_model() -> None:
    model = OnlyInTraining()
    chain = trace_chain(model.eval(), vectors(2))
    assert not model.training
    stage = chain.stage(0, len(chain))
    assert not stage.training
    assert torch.equal(stage(*vectors(3))[0], model(*vectors(3)))
    assert stage.train() is stage
    assert model.training
    assert not stage.eval().training


def test_layers_that_were_frozen_in_evaluation_mode_stay_so_in_training() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model[1].eval()
    before = model[1].running_mean.clone()
    chain = trace_chain(model, vectors(4))
    chain.stage(0, len(chain))(*vectors(4))
    assert model.training
    assert not model[1].training
    assert torch.equal(model[1].running_mean, before)


def test_tracing_works_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = trace_chain(Tied(), tokens(2))
        assert chain.crossing(2)[0].dtype == torch.bfloat16


def test_tracing_leaves_random_numbers_alone() -> None:
    model = chain_of_layers()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trace_chain(model, vectors(2))
    assert torch.equal(torch.rand(3), expected)


def test_a_sent_tensor_keeps_its_order_of_memory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    data = (images(4)[0].contiguous(memory_format=torch.channels_last),)
    chain = trace_chain(model, data)
    (crossing,) = chain.crossing(1)
    (value,) = chain.stage(0, 1)(*data)
    assert crossing.packed(value).is_contiguous()
    assert tuple(crossing.packed(value).shape) == crossing.packed_shape(4) == (4, 14, 14, 4)
    assert crossing.unpacked(crossing.packed(value)).stride() == value.stride()
