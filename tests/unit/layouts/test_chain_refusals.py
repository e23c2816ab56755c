"""A model whose stages would not be the model is refused, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.layouts.chain.tracing import trace_chain


class Base(nn.Module):
    """Two layers, and something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("count", torch.zeros(()))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return x


class BranchesOnValues(Base):
    """A branch on a value."""

    def between(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class BranchesOnOneSample(Base):
    """A branch on a batch size that is not traced."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) == 1 else x


class DividesByItself(Base):
    """A float that depends on the batch size."""

    def between(self, x: Tensor) -> Tensor:
        return x * (1.0 / len(x))


class Halves(Base):
    """A number that is not linear in the batch size."""

    def between(self, x: Tensor) -> Tensor:
        return x + x[: (len(x) + 3) // 4].sum()


class GoesThroughNumpy(Base):
    """Numbers that leave torch."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)


class ReplacesABuffer(Base):
    """A buffer that is replaced."""

    def between(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


class RemembersTheLastPass(Base):
    """State that is no buffer."""

    def between(self, x: Tensor) -> Tensor:
        before, self.kept = self.kept, x.detach().mean(0)
        return x if before is None else x + before


class Loops(Base):
    """As many operations as samples."""

    def between(self, x: Tensor) -> Tensor:
        for row in range(len(x)):
            x = x + row
        return x


X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (BranchesOnValues, "untraceable"),
        (BranchesOnOneSample, "differs"),
        (DividesByItself, "untraceable"),
        (Halves, "differs"),
        (GoesThroughNumpy, "untraceable"),
        (ReplacesABuffer, "differs"),
        (RemembersTheLastPass, "untraceable"),
        (Loops, "untraceable"),
    ],
)
def test_what_cannot_be_followed_is_refused(model: type[Base], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trace_chain(model(), X)
    assert refused.value.code == "layout"
    assert refused.value.facts["reason"] == reason
    assert refused.value.facts["model"] == model.__name__
    assert refused.value.facts["nearest"] == "sharded"


@pytest.mark.parametrize("inner", [BranchesOnValues, DividesByItself, GoesThroughNumpy, Loops, BranchesOnOneSample])
def test_a_module_inside_that_cannot_be_followed_is_kept_whole_or_refused(inner: type[Base]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), inner(), nn.Linear(4, 4))
    if inner is BranchesOnOneSample:
        with pytest.raises(ConfigError) as refused:
            trace_chain(model, X)
        assert refused.value.facts["samples"] == 1
        return
    chain = trace_chain(model, X)
    assert [unit.name for unit in chain.units] == ["0", "1", "2"]
    assert list(chain.kept_whole) == ["1"]


def test_a_cache_of_transformers_is_refused_with_the_setting_that_turns_it_off() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 12, "bos_token_id": 0, "eos_token_id": 0}
    with pytest.raises(ConfigError) as refused:
        trace_chain(GPT2LMHeadModel(GPT2Config(**sizes)), (torch.zeros(2, 5, dtype=torch.long),))
    assert "use_cache" in refused.value.facts["why"]


def test_hooks_on_the_model_itself_are_refused() -> None:
    model = Base()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError) as refused:
        trace_chain(model, X)
    assert refused.value.facts["reason"] == "untraceable"


def test_units_that_are_not_in_the_model_are_refused() -> None:
    class Wrong(Base):
        """Names a module that is not its own."""

        def pipeline_units(self) -> list[nn.Module]:
            return [nn.Linear(6, 4)]

    with pytest.raises(ConfigError) as refused:
        trace_chain(Wrong(), X)
    assert refused.value.facts["reason"] == "untraceable"


def test_units_that_do_not_make_the_output_are_refused() -> None:
    class Wrong(Base):
        """Leaves out a layer."""

        def pipeline_units(self) -> list[nn.Module]:
            return [self.first]

    with pytest.raises(ConfigError) as refused:
        trace_chain(Wrong(), X)
    assert (refused.value.facts["reason"], refused.value.facts["difference"]) == ("differs", "output")


def test_samples_of_another_shape_are_refused_when_they_come() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Conv1d(2, 2, 3))
    stage = trace_chain(model, (torch.randn(2, 1, 8),)).stage(0, 1)
    stage(torch.randn(5, 1, 8))
    with pytest.raises(ConfigError) as refused:
        stage(torch.randn(5, 1, 9))
    assert refused.value.facts["reason"] == "shape"
    assert refused.value.facts["shapes"] == [(5, 1, 9)]


def test_an_example_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        trace_chain(Base(), (torch.tensor(1.0),))
    assert refused.value.facts["reason"] == "inputs"
