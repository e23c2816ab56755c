"""From where the members of a new View continue, given what each of them holds."""

from __future__ import annotations

from syncline.data.assignment import Assignment, Position
from syncline.workers.recovery import Standing, SyncPlan, decode, encode, plan_sync

BEFORE = Assignment(Position(), size=3, count=100, batch=10, epochs=4)


def standing(worker_id, step, *, view=1, recovery="equal", committed=None):
    return Standing.of(worker_id, view, step, BEFORE, recovery, committed or {})


def plan(*standings: Standing) -> SyncPlan | None:
    return plan_sync(standings, count=100, batch=10, epochs=4)


def test_the_most_advanced_survivor_is_the_source_and_those_behind_it_and_new_ones_are_stale():
    found = plan(standing(0, 6), standing(2, 7), Standing(3))
    assert found is not None
    assert (found.source, found.stale, found.survivors, found.merges) == (1, (0, 2), (0, 1), False)
    assert found.assignment.start.step == 7
    assert found.assignment.size == 3
    assert found.assignment.requeued == (), "a synchronous step holds the samples of all workers, failed ones included"


def test_survivors_that_are_equally_far_need_no_state():
    found = plan(standing(0, 7), standing(2, 7))
    assert found is not None
    assert (found.source, found.stale) == (0, ())


def test_when_survivors_merge_only_new_workers_are_stale_and_uncommitted_samples_are_requeued():
    committed = {0: 7, 1: 5, 2: 6}
    found = plan(
        standing(0, 7, recovery="merge", committed=committed),
        standing(2, 6, recovery="merge", committed=committed),
        Standing(3),
    )
    assert found is not None
    assert found.merges
    assert (found.source, found.stale, found.survivors) == (0, (2,), (0, 1))
    expected = [*BEFORE.between(1, 5, 7), *BEFORE.between(2, 6, 7)]
    assert sum(high - low for _, low, high in found.assignment.requeued) == sum(high - low for _, low, high in expected)


def test_a_member_that_missed_a_view_counts_as_new():
    found = plan(standing(0, 9, view=1), standing(1, 7, view=2), standing(2, 7, view=2))
    assert found is not None
    assert (found.source, found.stale, found.survivors) == (1, (0,), (1, 2))


def test_all_load_the_newest_checkpoint_if_there_is_no_live_state_to_continue_from():
    assert plan(Standing(0), Standing(1)) is None
    assert plan(standing(0, 6, recovery="saved"), standing(1, 6, recovery="saved")) is None
    assert plan(standing(0, 6, recovery="equal"), standing(1, 6, recovery="saved")) is None
    skipped = Assignment(Position(epoch=1, step=6), size=3, count=100, batch=10, epochs=4)
    ahead = Standing.of(1, 1, 6, skipped, "equal", {})
    assert plan(standing(0, 6), ahead) is None, "a user's loop left an epoch early on one of them only"


def test_a_standing_arrives_as_it_was_sent():
    sent = standing(2, 6, recovery="merge", committed={0: 6, 2: 5})
    assert decode(encode(sent)) == sent
