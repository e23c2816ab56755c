"""Cutting by names, by speeds and within memory; and measuring what units cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from syncline.compute.recompute import recompute_activations
from syncline.errors import ConfigError, UnknownName
from syncline.layouts.chain.tracing import trace_chain
from syncline.layouts.cut import UnitCost, best_cut, check_stage_count, cut_at, cut_evenly
from syncline.layouts.stage_costs import measure_costs
from syncline.models import zoo

pytestmark = pytest.mark.usefixtures("one_thread")


def units(*seconds: float, names: str = "model.h.{}") -> list[UnitCost]:
    return [UnitCost(name=names.format(n), forward_s=s / 3, backward_s=2 * s / 3) for n, s in enumerate(seconds)]


def test_a_worker_at_half_speed_gets_half_of_the_units():
    cut = best_cut(units(*[1.0] * 10), 3, speeds=(1.0, 0.5, 1.0), micro_batches=100)
    assert [high - low for low, high in cut.stages] == [4, 2, 4]


def test_activations_are_sent_where_they_are_small():
    costs = [UnitCost(name=str(n), forward_s=1, backward_s=1, sent_bytes=b, returned_bytes=b)
             for n, b in enumerate((1e10, 1e10, 1e3, 1e10))]  # fmt: skip
    assert best_cut(costs, 2, micro_batches=4).boundaries == (3,)


def test_tied_parameters_and_kept_tensors_count_once_per_stage():
    costs = [
        UnitCost(name=str(n), forward_s=1, backward_s=1, parameters={"tied": 100}, kept={7: 10.0}, saved_bytes=1)
        for n in range(2)
    ]
    together = cut_evenly(costs, 1, micro_batches=4, optimizer_state=1)
    apart = cut_evenly(costs, 2, micro_batches=4, optimizer_state=1)
    assert together.memory_bytes == (300 + 10 + 2,)
    assert apart.memory_bytes == (300 + 2 * 11, 300 + 11)


def test_earlier_stages_hold_more_micro_batches_but_not_more_than_there_are():
    costs = [UnitCost(name=str(n), forward_s=1, backward_s=1, saved_bytes=10, samples=3) for n in range(4)]
    assert cut_evenly(costs, 4, micro_batches=8).memory_bytes == (120, 90, 60, 30)
    assert cut_evenly(costs, 4, micro_batches=2).memory_bytes == (60, 60, 60, 30)


def test_names_say_where_stages_begin_and_their_ends_are_enough():
    costs = units(*[1.0] * 8)
    assert cut_at(costs, "h.3, h.6", micro_batches=4).boundaries == (3, 6)
    assert cut_at(costs, ["model.h.2"], micro_batches=4).edges == (0, 2, 8)


def test_the_name_of_a_block_means_its_first_unit():
    costs = [UnitCost(name=name, forward_s=1.0, backward_s=1.0) for name in ("h.0.a", "h.0.b", "h.1.a", "h.1.b")]
    assert cut_at(costs, "h.1", micro_batches=4).edges == (0, 2, 4)


def test_an_unknown_name_is_reported_with_the_nearest():
    with pytest.raises(UnknownName) as unknown:
        cut_at(units(*[1.0] * 4), "h.33", micro_batches=4)
    assert unknown.value.facts["kind"] == "unit"
    assert "h.3" in unknown.value.facts["nearest"]


@pytest.mark.parametrize("names", ["h.6,h.3", "h.3,h.3", "h.0"])
def test_names_that_leave_a_stage_empty_are_refused(names):
    with pytest.raises(ConfigError) as refused:
        cut_at(units(*[1.0] * 8), names, micro_batches=4)
    assert refused.value.facts["reason"] == "cut-order"


def test_too_many_stages_are_refused_with_what_could_not_be_taken_apart():
    with pytest.raises(ConfigError) as refused:
        check_stage_count(3, 2, {"model.body": "it reads numbers"})
    assert (refused.value.facts["possible"], refused.value.facts["stages"]) == (2, 3)
    assert "model.body" in str(refused.value)
    with pytest.raises(ConfigError):
        check_stage_count(0, 2)


def test_explain_names_the_units_of_each_stage():
    lines = best_cut(units(1.0, 1.0, 2.0), 2, micro_batches=4).describe()
    assert "model.h.0 to model.h.1" in lines[0]
    assert "model.h.2" in lines[1]
    assert "20%" in lines[2]


MODELS = {
    "lenet": lambda: (zoo.build("lenet", (1, 28, 28), 10), torch.randn(8, 1, 28, 28)),
    "resnet18": lambda: (zoo.build("resnet18", (3, 16, 16), 10, width=8), torch.randn(4, 3, 16, 16)),
    "mlp": lambda: (zoo.build("mlp", (1, 28, 28), 10), torch.randn(64, 1, 28, 28)),
    "transformer": lambda: (
        zoo.build("transformer", (16,), 20, 20, width=32, heads=2, layers=4),
        torch.randint(20, (4, 16)),
    ),
    "autoencoder": lambda: (zoo.build("autoencoder", (64,), 1, None, hidden=(64, 32, 16)), torch.randn(32, 64)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_cut_by_measured_costs_is_as_fast_as_the_best_of_all(name):
    model, batch = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    chain = trace_chain(model, (batch,))
    costs = measure_costs(chain, (batch,), loss=lambda output: output.square().mean(), seconds=0.05)
    assert [cost.name for cost in costs] == [unit.name for unit in chain.units]
    assert all(cost.forward_s > 0 and cost.samples == len(batch) for cost in costs)
    assert sum(cost.parameter_bytes for cost in costs) == sum(4 * p.numel() for p in model.parameters())
    for speeds in ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0, 1.0), (1.0, 1.0, 0.5)):
        stages = len(speeds)
        settings = {"speeds": speeds, "micro_batches": 8}
        every = [
            cut_at(costs, [costs[n].name for n in inner], **settings).step_s
            for inner in itertools.combinations(range(1, len(costs)), stages - 1)
        ]
        assert best_cut(costs, stages, **settings).step_s <= 1.03 * min(every)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Blocks(nn.Module):
    """Layers of very different cost, with an input that is used late."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.requires_grad_(False)

    def forward(self, x):
        y = torch.tanh(self.small(x))
        z = self.large(y)
        for _ in range(60):
            z = torch.erfinv(torch.sin(z) / 2)
        return self.last(z + x)


def test_costs_say_which_unit_is_slow_what_crosses_and_what_is_kept():
    batch = torch.randn(256, 8)
    chain = trace_chain(Blocks(), (batch,))
    small, large, last = measure_costs(chain, (batch,), seconds=0.05)
    assert large.seconds > 3 * max(small.seconds, last.seconds)
    assert small.sent_bytes == 2 * 8 * 4  # the input too
    assert small.returned_bytes == 8 * 4  # it has no gradient
    assert (large.sent_bytes, last.sent_bytes) == (2 * 8 * 4 - 8 * 4, 0)
    assert large.saved_bytes >= 60 * 8 * 4
    assert set(small.kept) & set(large.kept)  # tanh keeps its result, and the next layer keeps it as its input
    assert (last.parameters, list(last.constants)) == ({}, ["last.weight"])
    assert large.spread_s >= 0


def test_recomputed_blocks_keep_their_inputs_only():
    def costs(recomputes: bool) -> list[UnitCost]:
        model = nn.Sequential(*(zoo.build("resnet18", (3, 8, 8), 4, width=4)[1:4]))
        if recomputes:
            assert recompute_activations(model)
        x = torch.randn(2, 4, 8, 8)
        return measure_costs(trace_chain(model, (x,)), (x,), seconds=0.01)

    plain, recomputed = costs(False), costs(True)
    assert sum(c.saved_bytes for c in recomputed) < sum(c.saved_bytes for c in plain) / 2
    assert all(cost.kept for cost in recomputed)
