"""Recomputing activations: the same bits with less memory, and nothing counted twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.compute.batch_norm import synchronize_batch_norm, take_part_without_samples
from syncline.compute.recompute import recompute_activations
from syncline.models import zoo
from syncline.testing.threads import run_on_threads


class Block(nn.Module):
    """A layer made of layers, with an argument by name and two results."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x + scale * self.inner(x), x.mean()


class Stack(nn.Module):
    """Blocks in a list that its own code goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, mean = block(x, scale=0.5)
            x = x + mean
        out: torch.Tensor = self.head(x)
        return out


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(),
        nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8), nn.Dropout(0.2, inplace=True), nn.Linear(8, 4),
    )  # fmt: skip


def small_resnet() -> nn.Module:
    return zoo.build("resnet50", (2, 8, 8), 4, width=2)


MODELS = {
    "a chain": (chain, (6,)),
    "blocks in a list": (Stack, (6,)),
    "resnet50": (small_resnet, (2, 8, 8)),
    "alexnet": (lambda: zoo.build("alexnet", (1, 15, 15), 4, hidden=8), (1, 15, 15)),
}


def steps(model: nn.Module, x: torch.Tensor, count: int = 2) -> dict[str, torch.Tensor]:
    """What a few steps come to: gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 4).backward()
        optimizer.step()
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, **model.state_dict(), "random": torch.rand(1)}


@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_same_bits_with_dropout_batch_norm_and_all(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    plain, x = make(), torch.randn(6, *shape)
    recomputing = copy.deepcopy(plain)
    assert recompute_activations(recomputing) > 0
    expected, actual = steps(plain, x), steps(recomputing, x)
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize(
    ("name", "blocks"), [("resnet50", 17), ("blocks in a list", 3), ("a chain", 1), ("alexnet", 1)]
)
def test_what_repeats_is_a_block_and_a_chain_is_cut_into_stretches(name: str, blocks: int) -> None:
    assert recompute_activations(MODELS[name][0]()) == blocks


def test_a_model_of_one_layer_has_nothing_to_recompute() -> None:
    assert recompute_activations(nn.Linear(3, 2)) == 0
    assert recompute_activations(zoo.build("lstm", (5, 3), 2)) == 0


@pytest.mark.parametrize("name", MODELS)
def test_less_is_kept_for_the_backward_pass(name: str) -> None:
    make, shape = MODELS[name]

    def kept_bytes(model: nn.Module) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(torch.randn(32, *shape))
        return sum(size for place, size in storages.items() if place not in parameters)

    torch.manual_seed(0)
    plain = make()
    recomputing = copy.deepcopy(plain)
    recompute_activations(recomputing)
    assert kept_bytes(recomputing) < 0.5 * kept_bytes(plain)


def test_evaluation_is_untouched() -> None:
    model = small_resnet().eval()
    x = torch.randn(3, 2, 8, 8)
    before = model(x)
    recompute_activations(model)
    assert torch.equal(model(x), before)


def test_a_copy_recomputes_with_its_own_parameters() -> None:
    torch.manual_seed(0)
    model = Stack()
    recompute_activations(model)
    clone = copy.deepcopy(model)
    clone(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in clone.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["resnet50", "a chain"])
@pytest.mark.parametrize("shares", [(4, 2), (3, 0)])
def test_statistics_of_the_global_batch_are_found_once_and_counted_once(name: str, shares: tuple[int, int]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the threads share one generator of random numbers
    x = torch.randn(4, *shape)

    def results(recomputes: bool) -> list[dict[str, torch.Tensor]]:
        def work(collective: Collective) -> tuple[dict[str, torch.Tensor], int]:
            own = synchronize_batch_norm(copy.deepcopy(model), collective)
            if recomputes:
                recompute_activations(own)
            share = shares[collective.rank]
            if share:
                nn.functional.cross_entropy(own(x[:share]), torch.arange(share)).backward()
            else:
                with take_part_without_samples(own):
                    nn.functional.cross_entropy(own(x[:1]), torch.arange(1)).backward()
            gradients = {f"{name}.grad": p.grad for name, p in own.named_parameters() if p.grad is not None}
            return {**gradients, **own.state_dict()}, collective.bytes_sent

        results = run_on_threads(2, work)
        sent.append([count for _, count in results])
        return [state for state, _ in results]

    sent: list[list[int]] = []
    for plain, recomputed in zip(results(False), results(True), strict=True):
        assert list(plain) == list(recomputed)
        for key, value in plain.items():
            assert torch.equal(recomputed[key], value), key
    assert sent[0] == sent[1], "what is known already is not asked for again"
