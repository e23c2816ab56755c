"""Which blocks are updated when, for any changes and relations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.blocks.schedule import Blocks, Relations, divide, pick, rotation, rounds_of_a_pass
from syncline.errors import ConfigError


@st.composite
def situations(draw):
    """Changes of some blocks, which of them are related, and the lanes."""
    count = draw(st.integers(1, 40))
    change = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=count, max_size=count)))
    seed = draw(st.integers(0, 10**6))
    related = np.random.default_rng(seed).random((count, count)) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    related |= related.T | np.eye(count, dtype=bool)
    return change, related, draw(st.integers(1, 6)), draw(st.integers(1, 8)), seed


def picked(situation, by="change", number=0):
    change, related, lanes, size, seed = situation
    return pick(
        change, by=by, lanes=lanes, size=size, related=lambda blocks: related[np.ix_(blocks, blocks)], seed=seed,
        number=number,
    )  # fmt: skip


@given(situations(), st.sampled_from(["change", "random", "cyclic"]), st.integers(0, 9))
def test_no_two_related_blocks_are_in_different_lanes(situation, by, number):
    lanes = picked(situation, by, number)
    related = situation[1]
    for one in range(len(lanes)):
        for other in range(one):
            assert not related[np.ix_(lanes[one], lanes[other])].any()


@given(situations(), st.sampled_from(["change", "random", "cyclic"]), st.integers(0, 9))
def test_each_block_is_updated_at_most_once_in_a_round_and_lanes_are_no_longer_than_asked(situation, by, number):
    lanes = picked(situation, by, number)
    every = np.concatenate(lanes)
    assert len(set(every.tolist())) == len(every)
    assert len(lanes) == situation[2]
    assert max(map(len, lanes)) <= situation[3]


@given(situations())
def test_the_block_that_changed_most_is_always_updated_and_one_without_change_never(situation):
    change, lanes = situation[0], picked(situation)
    every = np.concatenate(lanes)
    assert (change[every] > 0).all()
    if (change > 0).any():
        assert len(every)
        assert change[every].max() == change.max()


@given(situations())
def test_without_relations_the_most_changed_blocks_are_updated(situation):
    change, _, lanes, size, seed = situation
    every = np.concatenate(picked((change, np.eye(len(change), dtype=bool), lanes, size, seed)))
    places = min(lanes * size, int((change > 0).sum()))
    assert sorted(change[every])[::-1] == sorted(change)[::-1][:places]


@given(situations())
def test_every_block_that_has_to_change_is_updated_at_some_time(situation):
    """As long as blocks that were updated do not change again."""
    change, related, lanes, size, seed = situation
    change = change.copy()
    for _ in range(len(change)):
        for blocks in picked((change, related, lanes, size, seed)):
            change[blocks] = 0.0
    assert not change.any()


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_a_cyclic_pass_updates_all_blocks(count, lanes, size):
    free = Relations(lambda some, others: None, count)
    seen = set()
    for number in range(rounds_of_a_pass(count, lanes, size)):
        for blocks in pick(
            np.ones(count), by="cyclic", lanes=lanes, size=size, related=free, seed=0, number=number
        ):  # fmt: skip
            seen |= set(blocks.tolist())
    assert seen == set(range(count))


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 20))
def test_a_rotation_deals_disjoint_blocks_and_gives_each_lane_every_block(blocks, lanes, start):
    seen = [[] for _ in range(lanes)]
    for number in range(start, start + lanes):
        dealt = rotation(blocks, lanes, number)
        assert sorted(np.concatenate(dealt).tolist()) == list(range(blocks))
        for lane, own in enumerate(dealt):
            seen[lane] += own.tolist()
    assert all(sorted(own) == list(range(blocks)) for own in seen)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True), min_size=1, max_size=8))
def test_remembered_relations_are_those_that_a_comparison_finds(rounds):
    points = np.random.default_rng(0).random(30)

    def compare(some, others):
        return np.abs(points[some][:, None] - points[others]) < 0.2

    relations = Relations(compare, 30)
    for blocks in map(np.array, rounds):
        assert (relations(blocks) == compare(blocks, blocks)).all()


def test_a_block_that_conflicts_with_two_lanes_waits():
    conflicts = np.eye(3, dtype=bool)
    conflicts[2, :2] = conflicts[:2, 2] = True
    assert [lane.tolist() for lane in divide(np.array([4, 5, 6]), conflicts, 2, 2)] == [[4], [5]]


@pytest.mark.parametrize(
    "wrong", [{"by": "luck"}, {"size": 0}, {"lanes": 1.5}, {"staleness": -1}, {"apart": 2}, {"apart": float("nan")}]
)
def test_a_schedule_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError) as refused:
        Blocks(**wrong)
    assert refused.value.facts["setting"] in wrong
