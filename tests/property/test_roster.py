"""Whatever comes and goes, each worker is started once, at a place that is here, and its end is told once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.engines.outposts.roster import Roster, Start


class Comings(RuleBasedStateMachine):
    """Outposts on a few machines come and go, workers are launched and end, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.roster = Roster(patience_s=5.0, limit_s=30.0)
        self.here: dict[str, str] = {}
        self.names = 0
        self.lives: dict[int, int] = {}
        self.state: dict[int, str] = {}  # wanted, running or ended, of the present life of each worker
        self.where: dict[int, str] = {}

    @initialize(machines=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def begin(self, machines: list[str]) -> None:
        for seat, machine in enumerate(machines):
            self.come(machine, seat)
        self.roster.fix(len(machines))
        self.count, self.seated_on = len(machines), machines

    def come(self, machine: str, seat: int | None) -> None:
        self.names += 1
        name = f"o{self.names}"
        self.here[name] = machine
        self.take(self.roster.enrol(name, machine, seat))

    def take(self, starts: list[Start]) -> None:
        for start in starts:
            assert self.state[start.rank] == "wanted"
            assert start.life == self.lives[start.rank], "the life that was asked for last"
            assert start.outpost in self.here, "who is gone starts nothing"
            if len(set(self.seated_on)) == 1:
                assert self.here[start.outpost] == self.seated_on[0], "what shares memory stays together"
            self.state[start.rank], self.where[start.rank] = "running", start.outpost

    def told(self, ends: list) -> None:
        for end in ends:
            assert self.state[end.rank] in ("running", "wanted"), "an end is told once"
            assert end.life == self.lives[end.rank]
            assert end.in_words()
            self.state[end.rank] = "ended"

    @rule(machine=st.sampled_from("abc"), seat=st.one_of(st.none(), st.integers(0, 4)))
    def somebody_comes(self, machine: str, seat: int | None) -> None:
        self.come(machine, seat)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def somebody_goes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        kept = {r for r, o in self.where.items() if o == name and self.state[r] == "running"}
        del self.here[name]
        ends, starts = self.roster.gone(name, "was lost", self.now)
        assert {e.rank for e in ends} == kept, "all that it kept is lost, and nothing else"
        self.told(ends)
        self.take(starts)
        assert self.roster.gone(name, "again", self.now) == ([], []), "nobody goes twice"

    @rule(number=st.integers(0, 5))
    def launch(self, number: int) -> None:
        if self.state.get(number, "ended") != "ended":
            return
        self.lives[number] = self.lives.get(number, -1) + 1
        self.state[number] = "wanted"
        self.take(self.roster.launch(number, self.lives[number], self.now))

    @rule(number=st.integers(0, 5))
    def ends(self, number: int) -> None:
        is_running = self.state.get(number) == "running"
        assert self.roster.ended(number, self.lives.get(number, 0)) == is_running
        if is_running:
            self.state[number] = "ended"

    @rule(number=st.integers(0, 5))
    def is_not_wanted_any_more(self, number: int) -> None:
        if self.state.get(number) == "running":
            assert self.roster.where(number) == self.where[number]
            return
        self.told(self.roster.give_up(number))

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ends, starts = self.roster.tick(self.now)
        self.told(ends)
        self.take(starts)

    @invariant()
    def nobody_waits_who_has_a_seat(self) -> None:
        for number, state in self.state.items():
            if state == "wanted":
                assert self.roster.seats[number % self.count] is None

    @invariant()
    def seats_are_kept_by_those_who_are_here(self) -> None:
        kept = [o for o in self.roster.seats if o is not None]
        assert len(kept) == len(set(kept))
        assert set(kept) <= set(self.here)


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_worker_waits_for_its_own_place_and_then_takes_another_on_that_machine():
    roster = Roster(patience_s=5, limit_s=30)
    for name in "abc":
        roster.enrol(name, "one", None)
    roster.fix(3)
    assert roster.launch(1, 0, 0.0) == [Start("b", 1, 0)]
    ends, starts = roster.gone("b", "was lost", 1.0)
    assert [(e.rank, e.in_words()) for e in ends] == [(1, "was lost")]
    assert starts == []
    assert roster.launch(1, 1, 1.0) == []
    assert roster.tick(5.0) == ([], [])
    assert roster.tick(6.5) == ([], [Start("a", 1, 1)])


def test_who_comes_in_place_of_another_gets_its_seat_and_the_worker_that_waits():
    roster = Roster()
    roster.enrol("a", "one", 0)
    roster.enrol("b", "two", 1)
    roster.fix(2)
    roster.launch(1, 0, 0.0)
    roster.gone("b", "was lost", 1.0)
    assert roster.launch(1, 1, 1.0) == []
    assert roster.enrol("c", "one", None) == [], "the seat is on another machine"
    assert roster.enrol("d", "two", 1) == [Start("d", 1, 1)]


def test_without_any_place_a_worker_is_given_up_with_the_reason():
    roster = Roster(patience_s=5, limit_s=30)
    roster.enrol("a", "one", None)
    roster.fix(1)
    roster.gone("a", "was lost", 0.0)
    roster.launch(0, 1, 1.0)
    ends, starts = roster.tick(32.0)
    assert starts == []
    assert "found no place within 30 s" in ends[0].in_words()


@given(st.permutations(list(range(4))))
def test_seats_that_were_given_are_kept_whoever_comes_first(order: list[int]) -> None:
    roster = Roster()
    for seat in order:
        roster.enrol(f"o{seat}", "one", seat)
    roster.fix(4)
    assert roster.seats == ["o0", "o1", "o2", "o3"]
