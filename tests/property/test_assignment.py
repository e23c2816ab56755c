"""Whichever worker fails, and whenever: each sample of each epoch is applied exactly once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.data.assignment import Assignment, Position, cut, joined, total
from syncline.data.order import SampleOrder


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    count, batch = draw(st.integers(1, 60)), draw(st.integers(1, 20))
    return Assignment(Position(), draw(st.integers(1, 5)), count, batch, epochs=draw(st.integers(1, 3)))


@settings(max_examples=300)
@given(st.data(), assignments())
def test_each_sample_is_applied_exactly_once_whichever_worker_fails_and_whenever(
    data: st.DataObject, assignment: Assignment
) -> None:
    """Synchronous or not: any worker may be any number of steps behind its assignment when it fails."""
    effect: Counter[tuple[int, int]] = Counter()
    steps_left = -(-assignment.count // assignment.batch) * assignment.epochs
    for _ in range(data.draw(st.integers(0, 4), label="changes")):
        last = (
            assignment.start.step
            + len(assignment._requeued_steps)
            + steps_left
            - (assignment.start.step - assignment.start.extra)
        )
        done = {
            rank: data.draw(st.integers(assignment.start.step, max(last, assignment.start.step)), label=f"of {rank}")
            for rank in range(assignment.size)
        }
        for rank, step in done.items():
            _count(effect, assignment, rank, step)
        assignment = assignment.next(data.draw(st.integers(1, 5), label="size"), done)
    for rank in range(assignment.size):
        for dealt in assignment.steps_of(rank):
            for epoch, low, high in dealt.ranges:
                effect.update((epoch, i) for i in range(low, high))
    assert set(effect.values()) <= {1}
    assert set(effect) == {(epoch, i) for epoch in range(assignment.epochs) for i in range(assignment.count)}


def _count(effect: Counter[tuple[int, int]], assignment: Assignment, rank: int, step: int) -> None:
    for epoch, low, high in assignment.between(rank, assignment.start.step, step):
        effect.update((epoch, i) for i in range(low, high))


@given(assignments(), st.integers(0, 100), st.integers(1, 5))
def test_when_all_have_done_the_same_nothing_is_requeued(assignment: Assignment, step: int, size: int) -> None:
    after = assignment.next(size, dict.fromkeys(range(assignment.size), step))
    assert after.requeued == ()
    assert after.start == assignment.at(step)


@given(assignments(), st.integers(0, 3))
def test_the_position_of_a_step_is_where_the_steps_before_it_lead(assignment: Assignment, rank: int) -> None:
    position = assignment.start
    for dealt in assignment.steps_of(rank % assignment.size):
        assert dealt.position == position
        position = dealt.after(assignment.count)
    assert position.epoch == assignment.epochs


@given(assignments(), st.integers(1, 5))
def test_shares_name_the_samples_of_their_ranges(assignment: Assignment, seed: int) -> None:
    order = SampleOrder(seed=seed, count=assignment.count, batch=assignment.batch)
    seen = [
        int(i) for rank in range(assignment.size) for share in order.shares_of(assignment, rank) for i in share.indices
    ]
    assert Counter(seen) == Counter(dict.fromkeys(range(assignment.count), assignment.epochs))


def test_requeued_samples_may_come_from_several_epochs() -> None:
    assignment = Assignment(Position(1, 4, 5), 2, 8, 4, epochs=2, requeued=((0, 6, 8), (1, 0, 3)))
    assert [d.ranges for d in assignment.steps_of(0)] == [((0, 6, 8),), ((1, 2, 3),), ((1, 4, 6),)]
    assert [d.ranges for d in assignment.steps_of(1)] == [((1, 0, 2),), (), ((1, 6, 8),)]
    assert [d.position for d in assignment.steps_of(0)] == [
        Position(1, 4, 5),
        Position(1, 4, 6, 1),
        Position(1, 4, 7, 2),
    ]


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_a_cut_has_the_samples_between_its_ends(lengths: list[int], low: int, high: int) -> None:
    ranges = tuple((number, 3, 3 + length) for number, length in enumerate(lengths))
    samples = [(epoch, i) for epoch, a, b in ranges for i in range(a, b)]
    assert [(epoch, i) for epoch, a, b in cut(ranges, low, high) for i in range(a, b)] == samples[low:high]
    assert total(joined(reversed(ranges))) == len(samples)
