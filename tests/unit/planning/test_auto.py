"""`--strategy auto`: what is chosen of predicted strategies, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest
from unit.planning.test_profile import made_plan

from syncline.errors import ConfigError
from syncline.planning.cost.auto import is_auto_strategy, pick, read_mode, samples_text
from syncline.planning.cost.choice import TrainingPlan
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.samples import samples_factor
from syncline.planning.cost.step import Prediction, Term
from syncline.strategies.presets import PRESETS


def predicted(strategy: str, step_s: float, samples: Range | None = None, *, is_exact: bool = False) -> Prediction:
    return Prediction(
        strategy=strategy, layout="replicated", batch=64, workers=4, bytes_per_step=1.0, start_up_s=1.0,
        terms=(Term(name="forward", seconds=Range.around(step_s, 0.1), facts={}),),
        memory_bytes=Range.exactly(1.0), is_exact=is_exact, samples=Range.exactly(1.0) if is_exact else samples,
    )  # fmt: skip


def plan(*predictions: Prediction) -> TrainingPlan:
    return TrainingPlan(model="m", data="d", predictions=predictions, refused={})


EXACT = predicted("allreduce", 0.1, is_exact=True)


def test_a_strategy_that_trains_differently_must_be_worth_it_with_the_most_samples_that_it_may_need():
    quick = predicted("sparknet", 0.05, Range(0.9, 1.1, 1.5))
    assert pick(plan(EXACT, quick), exact_only=False).chosen == quick
    unsure = dataclasses.replace(quick, samples=Range(0.9, 1.1, 2.1))
    assert pick(plan(EXACT, unsure), exact_only=False).chosen == EXACT
    unknown = dataclasses.replace(quick, samples=None)
    assert pick(plan(EXACT, unknown), exact_only=False).chosen == EXACT
    assert pick(plan(EXACT, quick), exact_only=True).chosen == EXACT


def test_a_slow_network_changes_the_choice_but_not_that_among_exact_strategies():
    here, slow = made_plan(1, "1gbit"), made_plan(4, "100mbit,1ms")
    assert pick(here, exact_only=False).chosen.strategy == "allreduce"
    assert pick(slow, exact_only=False).chosen.strategy == "sparknet(10)"
    assert pick(slow, exact_only=True).chosen.strategy == "allreduce"


def test_of_those_that_are_worth_it_the_shortest_expected_time_counts_not_the_step():
    quickest = predicted("gossip", 0.03, Range(1.0, 2.0, 3.0))
    best = predicted("sparknet", 0.05, Range(1.0, 1.0, 1.1))
    assert pick(plan(EXACT, quickest, best), exact_only=False).chosen == best


def test_the_usual_exact_strategy_is_preferred_to_one_that_is_hardly_quicker():
    hardly = predicted("server-sync", 0.099, is_exact=True)
    much = predicted("server-sync", 0.09, is_exact=True)
    assert pick(plan(hardly, EXACT), exact_only=True).chosen == EXACT
    assert pick(plan(much, EXACT), exact_only=True).chosen == much


def test_what_is_chosen_is_said_with_its_cost_in_samples_and_the_best_exact_alternative():
    quick = predicted("sparknet", 0.05, Range(0.9, 1.1, 1.5))
    said = " ".join(pick(plan(EXACT, quick), exact_only=False).describe())
    for fact in (
        "sparknet",
        "50 ms",
        "10% more samples",
        "10% fewer to 50% more",
        "allreduce",
        "100 ms",
        "auto(exact)",
    ):
        assert fact in said
    said = " ".join(pick(plan(EXACT, dataclasses.replace(quick, samples=None)), exact_only=False).describe())
    assert "no more samples" in said
    slow = predicted("sparknet", 0.2, Range(0.9, 1.1, 1.5))
    assert "sparknet is the most promising" in " ".join(pick(plan(EXACT, slow), exact_only=False).describe())


def test_without_an_exact_strategy_nothing_is_chosen():
    with pytest.raises(ConfigError) as raised:
        pick(plan(predicted("sparknet", 0.05, Range.exactly(1.0))), exact_only=True)
    assert raised.value.code == "auto-strategy"


def test_auto_is_read_and_other_modes_are_refused():
    for text in ("auto", " auto ", "auto()", "auto(exact)", "auto( exact )", "auto(fast)"):
        assert is_auto_strategy(text)
    assert not is_auto_strategy("allreduce")
    assert not is_auto_strategy("auto.py:Mine")
    assert [read_mode(text) for text in ("auto", "auto( exact )", "auto(adapt)")] == ["", "exact", "adapt"]
    with pytest.raises(ConfigError) as raised:
        read_mode("auto(fast)")
    assert raised.value.facts["allowed"] == ["auto", "auto(exact)", "auto(adapt)"]


def test_factors_of_samples_are_those_of_the_presets_as_they_are():
    assert samples_factor("allreduce", is_exact=True) == Range.exactly(1.0)
    known = [factor for name in PRESETS if (factor := samples_factor(name, is_exact=False)) is not None]
    assert all(factor.low < factor.mid < factor.high for factor in known)
    assert samples_factor("sparknet(1000)", is_exact=False) is None, "nobody has measured it"


def test_factors_are_said_in_words():
    assert "as many samples as one process" in samples_text(Range.exactly(1.0))
    assert "2.5 times as many" in samples_text(Range(1.0, 2.5, 4.0))
    assert "unknown" in samples_text(None)
