"""Models that call `F.max_pool2d` get the compiled code, the same bits, and torch's own function outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncline.compute import functional_pooling
from syncline.compute.forward_scope import ForwardScope
from syncline.compute.functional_pooling import CompiledPooling, may_pool_functionally
from syncline.compute.kernels.build import why_unavailable

needs_compiler = pytest.mark.skipif(bool(why_unavailable()), reason=f"no kernels here: {why_unavailable()}")
IMAGES = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)


class Pooling(nn.Module):
    """Pools by a function, and fails if asked to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(self.scale * x, 2)
        if self.fails:
            raise ValueError("as asked")
        return y


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the compiled code."""
    made = []
    original = functional_pooling.pool
    monkeypatch.setattr(functional_pooling, "pool", lambda *a: made.append(a) or original(*a))
    return made


def passed(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x = IMAGES.clone(memory_format=torch.preserve_format).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@needs_compiler
def test_a_function_gives_the_same_bits_by_compiled_code(calls):
    model, scope = Pooling(), ForwardScope()
    usual = passed(copy.deepcopy(model))
    scope.watch([model])
    assert all(torch.equal(a, b) for a, b in zip(passed(model), usual, strict=True))
    assert len(calls) == 1


@needs_compiler
def test_what_the_compiled_code_does_not_support_is_left_to_torch(calls):
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    with CompiledPooling() as mode:
        for got, expected in [
            (F.max_pool2d(x, 3, 1), nn.MaxPool2d(3, 1)(x)),
            (F.max_pool2d(x, 2, ceil_mode=True), nn.MaxPool2d(2, ceil_mode=True)(x)),
            (F.max_pool2d(x, 2, return_indices=True)[1], nn.MaxPool2d(2, return_indices=True)(x)[1]),
            (F.max_pool2d(x.double(), 2), nn.MaxPool2d(2)(x.double())),
            (F.max_pool2d(x.contiguous(), 2), nn.MaxPool2d(2)(x.contiguous())),
        ]:
            assert torch.equal(got, expected)
    assert mode.calls == 0
    assert not calls


@needs_compiler
def test_after_a_failed_pass_the_script_has_torchs_function_again(calls):
    model, scope = Pooling(), ForwardScope()
    scope.watch([model])
    model.fails = True
    with pytest.raises(ValueError, match="as asked"):
        model(IMAGES)
    assert len(calls) == 1
    F.max_pool2d(IMAGES.requires_grad_(), 2)
    assert len(calls) == 1
    model.fails = False
    model(IMAGES)
    assert len(calls) == 2


def test_a_model_without_such_calls_is_searched_once(monkeypatch):
    entered = []
    monkeypatch.setattr(CompiledPooling, "__enter__", lambda self: entered.append(self) or self)
    monkeypatch.setattr(CompiledPooling, "__exit__", lambda *_: None)
    model, scope = nn.Linear(2, 2), ForwardScope()
    scope.watch([model])
    for _ in range(3):
        model(torch.randn(2, 2))
    assert len(entered) == 1


def test_where_the_function_is_not_looked_for():
    assert may_pool_functionally(Pooling())
    assert not may_pool_functionally(nn.Sequential(Pooling(), nn.MaxPool2d(2))), "its layers have been measured"
    compiled = Pooling()
    compiled.compile()
    assert not may_pool_functionally(compiled)
    assert not may_pool_functionally(torch.compile(Pooling()))
    torch.set_num_threads(2)
    assert not may_pool_functionally(Pooling())
