"""Predictions of layouts, made from that of replicated workers: what must hold for any model and machine."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.test_costs import few, networks, workloads

from syncline.errors import ConfigError
from syncline.layouts.choice import Candidate
from syncline.layouts.forecast import forecast
from syncline.layouts.layout import Layout, read_layout
from syncline.layouts.model_facts import ModelFacts, UnitCost
from syncline.planning.cost.choice import make_training_plan
from syncline.planning.cost.layouts import predict_layout
from syncline.planning.cost.step import predict
from syncline.strategies.method import RunConditions
from syncline.strategies.presets import PRESETS

costs = st.floats(1e-4, 1e-1)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    times = draw(st.lists(costs, min_size=4, max_size=8))
    units = tuple(
        UnitCost(name=f"u{i}", forward_s=t / 3, backward_s=2 * t / 3, parameters={f"u{i}": 40_000}, samples=1)
        for i, t in enumerate(times)
    )
    return ModelFacts(parameters={unit.name: 40_000 for unit in units}, largest_layer=40_000, units=units)


def forecasts(facts: ModelFacts, workload, layout: str):
    given_ = {"workers": workload.workers, "batch": workload.batch}
    return forecast(read_layout(layout), facts, **given_), forecast(Layout(), facts, **given_)


@few
@given(models(), workloads(), networks(hosts=1), st.sampled_from(["sharded", "pipeline(2)"]))
def test_a_layout_keeps_every_term_and_is_their_sum(facts, workload, network, layout):
    usual = predict(workload, "allreduce", PRESETS["allreduce"].make().method, network)
    found = predict_layout(usual, *forecasts(facts, workload, layout), workload, network)
    assert {term.name for term in found.terms} == {term.name for term in usual.terms}
    assert found.step_s.mid == pytest.approx(sum(term.seconds.mid for term in found.terms))
    assert found.layout == layout
    assert found.is_exact
    assert type(found).from_dict(found.to_dict()) == found


@few
@given(models(), workloads(), networks(hosts=1))
def test_the_replicated_layout_is_predicted_as_it_was_measured(facts, workload, network):
    usual = predict(workload, "allreduce", PRESETS["allreduce"].make().method, network)
    again = predict_layout(usual, *forecasts(facts, workload, "replicated"), workload, network)
    assert again.step_s.mid == pytest.approx(usual.step_s.mid)


@few
@given(models(), workloads())
def test_a_bubble_costs_time_where_each_stage_has_a_core_and_less_where_it_has_none(facts, workload):
    def waiting(cores: int) -> float:
        network = dataclasses.replace(some, cores=cores)
        usual = predict(workload, "allreduce", PRESETS["allreduce"].make().method, network)
        found = predict_layout(usual, *forecasts(facts, workload, "pipeline(2)"), workload, network)
        compute = sum(found.term(name).mid for name in ("forward", "backward"))
        return (found.term("waiting").mid - usual.term("waiting").mid) / compute

    from syncline.planning.cost.network import Network, read_link

    some = Network(link=read_link("1gbit"))
    assert waiting(64) > 0
    assert waiting(1) <= waiting(64)


@few
@given(models(), workloads(), networks(hosts=1))
def test_layouts_are_planned_with_the_strategies_that_sum_gradients_and_refusals_are_named(facts, workload, network):
    refused = Candidate(layout=read_layout("tensor(2)"), refused="the model has no layers that tensor divides")
    looked = [
        Candidate(layout=read_layout(layout), forecast=forecasts(facts, workload, layout)[0])
        for layout in ("replicated", "sharded")
    ]
    plan = make_training_plan(
        workload, network, model="m", data="d", strategies=["allreduce", "sparknet"], layouts=[*looked, refused],
        conditions=RunConditions(workers=workload.workers),
    )  # fmt: skip
    assert [(p.strategy, p.layout) for p in plan.predictions if p.layout != "replicated"] == [("allreduce", "sharded")]
    assert "allreduce, tensor(2)" in plan.refused
    assert "sharded" in plan.why("allreduce", "sharded")
    assert "cannot be used" in plan.why("allreduce", "tensor(2)")
    with pytest.raises(ConfigError):
        plan.why("sparknet", "sharded")
    assert plan.best.is_exact
    if plan.best.layout != "replicated":
        usual = next(p for p in plan.predictions if p.is_exact and p.layout == "replicated")
        assert plan.best.step_s.mid < usual.step_s.mid / 1.05
