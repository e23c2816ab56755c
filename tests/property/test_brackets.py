"""Tournaments: who meets whom, who wins, and what varies afterwards."""

from __future__ import annotations

import math

import pytest
from generators import member_lists, seeds
from hypothesis import given
from hypothesis import strategies as st

from syncline.strategies.brackets import draw, perturb, rival_wins

rounds = st.integers(0, 1000)
scores = st.floats(allow_nan=True, allow_infinity=True)
hyperparameters = st.dictionaries(st.sampled_from(["lr", "momentum", "weight_decay"]), st.floats(1e-6, 1e3))


@given(member_lists, rounds, seeds)
def test_everybody_is_drawn_once_and_an_odd_one_has_a_bye(members, round, seed):
    bracket = draw(members, round, seed)
    drawn = [rank for two in bracket.pairs for rank in two]
    assert sorted(drawn + ([] if bracket.bye is None else [bracket.bye])) == sorted(members)
    assert (bracket.bye is not None) == (len(members) % 2 == 1)


@given(member_lists, rounds, seeds)
def test_a_rival_of_a_rival_is_oneself(members, round, seed):
    bracket = draw(members, round, seed)
    for rank in members:
        rival = bracket.rival_of(rank)
        assert rival != rank
        assert rival is None or bracket.rival_of(rival) == rank
        assert (rival is None) == (rank == bracket.bye)


@given(member_lists, rounds, seeds)
def test_everyone_draws_the_same_round_whatever_the_order_of_its_list(members, round, seed):
    assert draw(members, round, seed) == draw(members[::-1], round, seed)


def test_over_many_rounds_everybody_meets_everybody():
    met = {two for round in range(200) for two in draw(range(6), round, seed=0).pairs}
    assert met == {(a, b) for a in range(6) for b in range(a + 1, 6)}


def test_over_many_rounds_the_bye_goes_round():
    assert {draw(range(5), round, seed=0).bye for round in range(100)} == set(range(5))


def test_a_rank_that_is_not_there_has_no_rival():
    with pytest.raises(ValueError, match="Rank 9 is not in this round"):
        draw(range(4), 0, 0).rival_of(9)


@given(scores, scores, st.booleans())
def test_at_most_one_of_two_models_beats_the_other(own, rival, lower_is_better):
    there = rival_wins(own, rival, lower_is_better=lower_is_better)
    back = rival_wins(rival, own, lower_is_better=lower_is_better)
    assert not (there and back)
    if not (math.isnan(own) or math.isnan(rival)):
        assert (there or back) == (own != rival)
        assert there == (rival < own if lower_is_better else rival > own)


@given(scores, st.booleans())
def test_a_tie_goes_to_ones_own_model(score, lower_is_better):
    assert not rival_wins(score, score, lower_is_better=lower_is_better)


@given(scores.filter(lambda score: not math.isnan(score)), st.booleans())
def test_nan_loses_against_every_number(score, lower_is_better):
    assert rival_wins(math.nan, score, lower_is_better=lower_is_better)
    assert not rival_wins(score, math.nan, lower_is_better=lower_is_better)


@given(hyperparameters, rounds, st.integers(0, 100), seeds, st.floats(1.0, 3.0))
def test_a_perturbed_hyperparameter_stays_within_its_factor(values, round, rank, seed, factor):
    perturbed = perturb(values, round=round, rank=rank, seed=seed, factor=factor)
    assert list(perturbed) == list(values)
    for name, value in values.items():
        assert value / factor * (1 - 1e-9) <= perturbed[name] <= value * factor * (1 + 1e-9)
    assert perturbed == perturb(values, round=round, rank=rank, seed=seed, factor=factor)


@given(hyperparameters, rounds, st.integers(0, 100), seeds)
def test_a_perturbation_does_not_depend_on_what_else_is_perturbed(values, round, rank, seed):
    together = perturb(values, round=round, rank=rank, seed=seed)
    for name, value in values.items():
        assert perturb({name: value}, round=round, rank=rank, seed=seed) == {name: together[name]}


@given(st.floats(0.5, 0.999), rounds, seeds)
def test_limits_hold(momentum, round, seed):
    perturbed = perturb(
        {"momentum": momentum}, round=round, rank=0, seed=seed, factor=3, limits={"momentum": (0.5, 0.99)}
    )
    assert 0.5 <= perturbed["momentum"] <= 0.99


def test_a_factor_of_one_changes_nothing():
    assert perturb({"lr": 0.1}, round=0, rank=0, seed=0, factor=1) == {"lr": 0.1}


def test_ranks_and_rounds_are_perturbed_differently_and_on_average_not_at_all():
    factors = [perturb({"lr": 1.0}, round=round, rank=rank, seed=0)["lr"] for round in range(40) for rank in range(40)]
    assert len(set(factors)) == len(factors)
    assert abs(sum(map(math.log, factors)) / len(factors)) < 0.01


@pytest.mark.parametrize("factor", [0.5, math.inf, math.nan])
def test_a_factor_below_one_or_without_end_is_refused(factor):
    with pytest.raises(ValueError, match="The factor of a perturbation is"):
        perturb({"lr": 0.1}, round=0, rank=0, seed=0, factor=factor)
