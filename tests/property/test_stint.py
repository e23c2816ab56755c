"""Whoever dies, whenever: each sample of each epoch takes effect exactly once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.data.order import SampleOrder
from syncline.data.position import Position
from syncline.data.stint import Stint, cut, joined, total


@st.composite
def stints(draw: st.DrawFn) -> Stint:
    count, batch = draw(st.integers(1, 60)), draw(st.integers(1, 20))
    return Stint(Position(), draw(st.integers(1, 5)), count, batch, epochs=draw(st.integers(1, 3)))


@settings(max_examples=300)
@given(st.data(), stints())
def test_each_sample_takes_effect_exactly_once_whoever_is_lost_and_whenever(data: st.DataObject, stint: Stint) -> None:
    """Synchronous or not: any worker may be any number of steps behind what it was dealt when it is lost."""
    effect: Counter[tuple[int, int]] = Counter()
    steps_left = -(-stint.count // stint.batch) * stint.epochs
    for _ in range(data.draw(st.integers(0, 4), label="changes")):
        last = stint.start.step + len(stint._made_up) + steps_left - (stint.start.step - stint.start.extra)
        done = {
            rank: data.draw(st.integers(stint.start.step, max(last, stint.start.step)), label=f"of {rank}")
            for rank in range(stint.size)
        }
        for rank, step in done.items():
            _count(effect, stint, rank, step)
        stint = stint.next(data.draw(st.integers(1, 5), label="size"), done)
    for rank in range(stint.size):
        for dealt in stint.dealt(rank):
            for epoch, low, high in dealt.ranges:
                effect.update((epoch, i) for i in range(low, high))
    assert set(effect.values()) <= {1}
    assert set(effect) == {(epoch, i) for epoch in range(stint.epochs) for i in range(stint.count)}


def _count(effect: Counter[tuple[int, int]], stint: Stint, rank: int, step: int) -> None:
    for epoch, low, high in stint.between(rank, stint.start.step, step):
        effect.update((epoch, i) for i in range(low, high))


@given(stints(), st.integers(0, 100), st.integers(1, 5))
def test_when_all_have_done_the_same_nothing_is_made_up_for(stint: Stint, step: int, size: int) -> None:
    after = stint.next(size, dict.fromkeys(range(stint.size), step))
    assert after.makeup == ()
    assert after.start == stint.at(step)


@given(stints(), st.integers(0, 3))
def test_the_position_of_a_step_is_where_the_steps_before_it_lead(stint: Stint, rank: int) -> None:
    position = stint.start
    for dealt in stint.dealt(rank % stint.size):
        assert dealt.position == position
        position = dealt.after(stint.count)
    assert position.epoch == stint.epochs


@given(stints(), st.integers(1, 5))
def test_shares_name_the_samples_of_their_ranges(stint: Stint, seed: int) -> None:
    order = SampleOrder(seed=seed, count=stint.count, batch=stint.batch)
    seen = [int(i) for rank in range(stint.size) for share in order.shares_of(stint, rank) for i in share.indices]
    assert Counter(seen) == Counter(dict.fromkeys(range(stint.count), stint.epochs))


def test_what_is_made_up_for_may_come_from_several_epochs() -> None:
    stint = Stint(Position(1, 4, 5), 2, 8, 4, epochs=2, makeup=((0, 6, 8), (1, 0, 3)))
    assert [d.ranges for d in stint.dealt(0)] == [((0, 6, 8),), ((1, 2, 3),), ((1, 4, 6),)]
    assert [d.ranges for d in stint.dealt(1)] == [((1, 0, 2),), (), ((1, 6, 8),)]
    assert [d.position for d in stint.dealt(0)] == [Position(1, 4, 5), Position(1, 4, 6, 1), Position(1, 4, 7, 2)]


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_a_cut_has_the_samples_between_its_ends(lengths: list[int], low: int, high: int) -> None:
    ranges = tuple((number, 3, 3 + length) for number, length in enumerate(lengths))
    samples = [(epoch, i) for epoch, a, b in ranges for i in range(a, b)]
    assert [(epoch, i) for epoch, a, b in cut(ranges, low, high) for i in range(a, b)] == samples[low:high]
    assert total(joined(reversed(ranges))) == len(samples)
