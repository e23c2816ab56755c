"""The best cut is the best: no other has a shorter predicted step, and each stage fits into memory."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.layouts.cut import StageLink, UnitCost, best_cut, cut_at, cut_evenly

SECONDS = st.one_of(st.just(0.0), st.floats(1e-4, 1.0))
BYTES = st.integers(0, 10**9)


@st.composite
def unit_costs(draw: st.DrawFn) -> list[UnitCost]:
    count = draw(st.integers(1, 9))
    return [
        UnitCost(
            name=f"h.{n}",
            forward_s=draw(SECONDS),
            backward_s=draw(SECONDS),
            samples=draw(st.just(2)),
            sent_bytes=draw(BYTES),
            returned_bytes=draw(BYTES),
            saved_bytes=draw(BYTES),
            kept={n: draw(BYTES)},
            parameters={f"p{draw(st.integers(0, 5))}": 10**8},  # some are tied
        )
        for n in range(count)
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[UnitCost], int, dict[str, object]]:
    costs = draw(unit_costs())
    stages = draw(st.integers(1, len(costs)))
    speed = st.sampled_from([0.25, 0.5, 1.0, 2.0])
    settings: dict[str, object] = {
        "micro_batches": draw(st.integers(1, 12)),
        "speeds": draw(st.one_of(st.just(()), st.lists(speed, min_size=stages, max_size=stages))),
        "link": StageLink(bytes_per_s=draw(st.sampled_from([1e8, 1e10])), latency_s=draw(st.sampled_from([0.0, 1e-3]))),
        "optimizer_state": draw(st.sampled_from([0.0, 2.0])),
    }
    return costs, stages, settings


def all_cuts(costs, stages, settings):
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        if inner:
            yield cut_at(costs, [costs[n].name for n in inner], **settings)
        else:
            yield cut_evenly(costs, 1, **settings)


def assert_fastest(found, every):
    """With one micro-batch, it is the smallest of those that are as fast as can be measured."""
    fastest = min(cut.step_s for cut in every)
    if found.micro_batches > 1:
        assert found.step_s == pytest.approx(fastest, rel=1e-9)
        return
    assert found.step_s <= fastest * 1.02 * (1 + 1e-9)
    as_fast = [cut for cut in every if cut.step_s <= fastest * 1.02 * (1 - 1e-9)]
    assert max(found.memory_bytes) <= min(max(cut.memory_bytes) for cut in as_fast)


@given(problems())
def test_no_other_cut_is_faster(problem):
    costs, stages, settings = problem
    found = best_cut(costs, stages, **settings)
    assert_fastest(found, list(all_cuts(costs, stages, settings)))
    assert [low for low, _ in found.stages] == [0, *found.boundaries]
    assert found.edges[-1] == len(costs)
    assert all(low < high for low, high in found.stages)


@given(problems(), st.floats(0, 1))
def test_within_a_limit_of_memory_no_other_cut_is_faster(problem, part):
    costs, stages, settings = problem
    every = list(all_cuts(costs, stages, settings))
    needs = sorted({max(cut.memory_bytes) for cut in every})
    limit = needs[round(part * (len(needs) - 1))]
    found = best_cut(costs, stages, memory_limit=limit, **settings)
    fitting = [cut for cut in every if max(cut.memory_bytes) <= limit]
    assert max(found.memory_bytes) <= limit
    assert_fastest(found, fitting)
    with pytest.raises(ConfigError) as refused:
        best_cut(costs, stages, memory_limit=needs[0] - 1, **settings)
    assert refused.value.facts["reason"] == "memory"
    assert refused.value.facts["needed"] == needs[0]


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_equal_stages_have_the_bubble_of_the_formula(stages, micro_batches, each):
    costs = [UnitCost(name=str(n), forward_s=1.0, backward_s=2.0) for n in range(stages * each)]
    cut = best_cut(costs, stages, micro_batches=micro_batches)
    assert cut.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert cut.balance == pytest.approx(1.0)
    assert cut.step_s == pytest.approx(3.0 * each * (micro_batches + stages - 1))


@given(unit_costs(), st.integers(1, 5))
def test_a_chain_cannot_have_more_stages_than_units(costs, more):
    with pytest.raises(ConfigError) as refused:
        best_cut(costs, len(costs) + more, micro_batches=4)
    assert refused.value.code == "layout"
    assert refused.value.facts["reason"] == "too-many-stages"
    assert refused.value.facts["possible"] == len(costs)


@given(problems())
def test_bubble_and_balance_are_fractions(problem):
    costs, stages, settings = problem
    cut = best_cut(costs, stages, **settings)
    assert -1e-9 <= cut.bubble < 1
    assert 0 < cut.balance <= 1 + 1e-9
    assert len(cut.describe()) == stages + 1
    assert all(math.isfinite(seconds) for seconds in cut.times_s)
