"""Workers that go each at its own pace agree on where and what, in whatever order things happen, and nobody hangs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from syncline.testing.threads import run_on_threads
from syncline.workers.meeting import Agreement, Meeting

LIMIT_S = 20.0
LAST = 12
"""All loops end after so many steps."""


class Schedule:
    """Says whose move it is: each rank as often as it is named, and whoever cannot move is passed over.

    A rank asks for its move before each step. A rank that waits for others (in a meeting, at a gate) or is done does
    not ask, and so the next one named that does ask moves. That makes every interleaving of steps possible.
    """

    def __init__(self, moves: list[int], size: int) -> None:
        self._moves = moves
        self._size = size
        self._changed = threading.Condition()
        self._asking: set[int] = set()
        self._busy = size

    def step(self, rank: int) -> None:
        """Wait for a move."""
        with self._changed:
            self._asking.add(rank)
            self._busy -= 1
            self._grant()
            assert self._changed.wait_for(lambda: rank not in self._asking, LIMIT_S), f"rank {rank} never moved"

    def away(self, rank: int, is_away: bool) -> None:
        """A rank that is away waits for others, not for its move."""
        with self._changed:
            self._busy += -1 if is_away else 1
            self._grant()

    def _grant(self) -> None:
        while self._busy == 0 and self._asking:
            named = next((i for i, rank in enumerate(self._moves) if rank in self._asking), None)
            rank = self._moves.pop(named) if named is not None else min(self._asking)
            self._asking.discard(rank)
            self._busy += 1
            self._changed.notify_all()


@dataclass
class Story:
    """What happens in one test, and what was seen of it."""

    size: int
    stops: dict[int, int] = field(default_factory=dict)
    """The steps after which ranks wish to stop."""
    saves: dict[int, set[int]] = field(default_factory=dict)
    """The steps after which ranks wish to save; a wish lasts until something was saved."""
    musts: set[int] = field(default_factory=set)
    """The steps after which all must be together."""
    bound: int | None = None
    """How far ahead of the slowest a rank may begin a step."""
    called: int = -1
    steps: dict[int, int] = field(default_factory=dict)


class Requests:
    """One rank's wishes, and the board that all see."""

    def __init__(self, story: Story, rank: int) -> None:
        self._story, self._rank = story, rank
        self.wants_save = False

    def stop_requested(self) -> bool:
        return self._story.steps[self._rank] >= self._story.stops.get(self._rank, LAST + 1)

    def save_requested(self) -> bool:
        return self.wants_save

    def call_meeting(self, number: int) -> None:
        self._story.called = max(self._story.called, number)

    def meeting_called(self, number: int) -> bool:
        return self._story.called >= number


def play(story: Story, moves: list[int]) -> list[list[tuple[int, Agreement]]]:
    """Every rank's agreements, each with the step at which it heard of it."""
    story.steps = dict.fromkeys(range(story.size), 0)
    schedule = Schedule(list(moves), story.size)
    gate = threading.Condition()

    def work(collective):
        rank, calls = collective.rank, Requests(story, collective.rank)
        meeting = Meeting(collective, calls)
        agreements: list[tuple[int, Agreement]] = []

        def may_continue(limit_s: float) -> bool:
            if story.bound is None:
                return True
            with gate:
                return gate.wait_for(lambda: story.steps[rank] - min(story.steps.values()) <= story.bound, limit_s)

        for step in range(1, LAST + 1):
            schedule.step(rank)
            if story.bound is not None:
                assert story.steps[rank] - min(story.steps.values()) <= story.bound
            with gate:
                story.steps[rank] = step
                gate.notify_all()
            calls.wants_save = calls.wants_save or step in story.saves.get(rank, ())
            schedule.away(rank, True)
            agreed = meeting.after_step(step, must=step in story.musts or step == LAST, may_continue=may_continue)
            schedule.away(rank, False)
            if agreed is not None:
                agreements.append((step, agreed))
                calls.wants_save = calls.wants_save and not agreed.save
                if agreed.stop:
                    break
        with gate:
            story.steps[rank] = 10**9  # whoever is done holds up nobody
            gate.notify_all()
        schedule.away(rank, True)
        return agreements

    return run_on_threads(story.size, work, timeout_s=LIMIT_S)


sizes = st.integers(1, 4)
steps = st.integers(1, LAST)
moves = st.lists(st.integers(0, 3), max_size=60)
ranks = st.integers(0, 3)
stories = st.builds(
    Story,
    sizes,
    stops=st.dictionaries(ranks, steps, max_size=2),
    saves=st.dictionaries(ranks, st.sets(steps, max_size=3), max_size=3),
    musts=st.sets(steps, max_size=3),
    bound=st.none() | st.integers(0, 3),
)
some = settings(max_examples=60)


@some
@given(story=stories, moves=moves)
@example(story=Story(2, stops={1: 1}), moves=[0] * 9)
@example(story=Story(3, saves={2: {1}}, bound=0), moves=[0, 0, 0, 1, 1, 1])
@example(story=Story(4, stops={3: 4}, saves={0: {4}}, musts={4}), moves=[3] * 4)
def test_all_workers_get_the_same_agreements_at_the_same_steps(story, moves):
    heard = play(story, moves)
    assert all(mine == heard[0] for mine in heard), heard


@some
@given(story=stories, moves=moves)
def test_all_are_together_wherever_they_must_be_and_at_the_end(story, moves):
    (agreements, *_) = play(story, moves)
    end, last = agreements[-1]
    places = [step for step, _ in agreements]
    assert {step for step in story.musts if step <= end} <= set(places)
    assert places == sorted(set(places))
    assert last.stop or end == LAST


@some
@given(story=stories, moves=moves)
def test_a_wish_to_stop_is_heard_and_stops_all_unless_the_end_comes_first(story, moves):
    (agreements, *_) = play(story, moves)
    wishes = [step for rank, step in story.stops.items() if rank < story.size]
    end, last = agreements[-1]
    assert last.stop == bool(wishes) or end == LAST
    assert not any(agreed.stop for _, agreed in agreements[:-1])
    if last.stop:
        assert end >= min(wishes)
    if wishes:
        # What is agreed on at a step may have been settled before somebody on its way there had the wish; once only.
        assert sum(min(wishes) <= step < end for step, _ in agreements) <= 1


@some
@given(story=stories, moves=moves)
def test_a_wish_to_save_is_heard_by_all_after_it_was_made_and_no_save_comes_without_one(story, moves):
    (agreements, *_) = play(story, moves)
    wishes = [step for rank, steps in story.saves.items() if rank < story.size for step in steps]
    saves = [step for step, agreed in agreements if agreed.save]
    end = agreements[-1][0]
    assert all(any(wish <= save for wish in wishes) for save in saves)
    assert all(any(save >= wish for save in saves) for wish in wishes if wish <= end and not story.stops)
    assert len(saves) <= len(wishes)


@some
@given(size=st.integers(2, 4), rank=ranks, wish=steps, moves=moves, bound=st.integers(0, 3))
def test_with_a_gate_all_stop_within_its_bound_of_the_wish(size, rank, wish, moves, bound):
    story = Story(size, stops={rank % size: wish}, bound=bound)
    heard = play(story, moves)
    # When the wish is made, the others are at most so far ahead, and have at most one step more under way.
    assert heard[0][-1][0] <= min(LAST, wish + bound + 1)
    assert all(mine == heard[0] for mine in heard)


@some
@given(size=sizes, moves=moves, bound=st.none() | st.integers(0, 3))
def test_without_wishes_nobody_meets_before_the_end(size, moves, bound):
    assert play(Story(size, bound=bound), moves) == [[(LAST, Agreement(False, False))]] * size


def test_a_worker_that_is_held_up_attends_a_meeting_that_is_called_meanwhile():
    """It waits for the slowest, which waits for it in the meeting: it must come, and go on to the same step."""
    story = Story(2, stops={1: 2}, bound=1)
    heard = play(story, [0, 0, 0, 0, 1, 1])
    assert heard[0] == heard[1]
    assert heard[0][-1][1].stop
    assert heard[0][-1][0] <= 4
