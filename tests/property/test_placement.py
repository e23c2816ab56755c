"""Whichever agents come and go, each worker is started once, on a connected agent, and its exit reported once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.engines.remote.placement import Placement, StartOn


class AgentsComeAndGo(RuleBasedStateMachine):
    """Agents on a few machines come and go, workers are launched and exit, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.placement = Placement(patience_s=5.0, limit_s=30.0)
        self.here: dict[str, str] = {}
        self.names = 0
        self.lives: dict[int, int] = {}
        self.state: dict[int, str] = {}  # wanted, running or ended, of the current life of each worker
        self.where: dict[int, str] = {}

    @initialize(machines=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def begin(self, machines: list[str]) -> None:
        for slot, machine in enumerate(machines):
            self.come(machine, slot)
        self.placement.fix(len(machines))
        self.count, self.slots_on = len(machines), machines

    def come(self, machine: str, slot: int | None) -> None:
        self.names += 1
        name = f"o{self.names}"
        self.here[name] = machine
        self.take(self.placement.add_agent(name, machine, slot))

    def take(self, starts: list[StartOn]) -> None:
        for start in starts:
            assert self.state[start.worker_id] == "wanted"
            assert start.life == self.lives[start.worker_id], "the life that was launched last"
            assert start.agent in self.here, "an agent that is gone starts nothing"
            if len(set(self.slots_on)) == 1:
                assert self.here[start.agent] == self.slots_on[0], "workers that share memory stay on one machine"
            self.state[start.worker_id], self.where[start.worker_id] = "running", start.agent

    def report(self, ends: list) -> None:
        for end in ends:
            assert self.state[end.worker_id] in ("running", "wanted"), "an exit is reported once"
            assert end.life == self.lives[end.worker_id]
            assert end.describe()
            self.state[end.worker_id] = "ended"

    @rule(machine=st.sampled_from("abc"), slot=st.one_of(st.none(), st.integers(0, 4)))
    def an_agent_connects(self, machine: str, slot: int | None) -> None:
        self.come(machine, slot)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def an_agent_disconnects(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        kept = {r for r, o in self.where.items() if o == name and self.state[r] == "running"}
        del self.here[name]
        ends, starts = self.placement.remove_agent(name, "was lost", self.now)
        assert {e.worker_id for e in ends} == kept, "its workers are gone, and no others"
        self.report(ends)
        self.take(starts)
        assert self.placement.remove_agent(name, "again", self.now) == ([], []), "an agent leaves once"

    @rule(number=st.integers(0, 5))
    def launch(self, number: int) -> None:
        if self.state.get(number, "ended") != "ended":
            return
        self.lives[number] = self.lives.get(number, -1) + 1
        self.state[number] = "wanted"
        self.take(self.placement.launch(number, self.lives[number], self.now))

    @rule(number=st.integers(0, 5))
    def ends(self, number: int) -> None:
        is_running = self.state.get(number) == "running"
        assert self.placement.on_exit(number, self.lives.get(number, 0)) == is_running
        if is_running:
            self.state[number] = "ended"

    @rule(number=st.integers(0, 5))
    def is_cancelled(self, number: int) -> None:
        if self.state.get(number) == "running":
            assert self.placement.agent_of(number) == self.where[number]
            return
        self.report(self.placement.cancel(number))

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ends, starts = self.placement.tick(self.now)
        self.report(ends)
        self.take(starts)

    @invariant()
    def no_worker_waits_whose_slot_has_an_agent(self) -> None:
        for number, state in self.state.items():
            if state == "wanted":
                assert self.placement.slots[number % self.count] is None

    @invariant()
    def slots_belong_to_connected_agents(self) -> None:
        kept = [o for o in self.placement.slots if o is not None]
        assert len(kept) == len(set(kept))
        assert set(kept) <= set(self.here)


TestAgentsComeAndGo = AgentsComeAndGo.TestCase
TestAgentsComeAndGo.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_worker_waits_for_its_own_slot_and_then_runs_on_another_agent_of_that_machine():
    placement = Placement(patience_s=5, limit_s=30)
    for name in "abc":
        placement.add_agent(name, "one", None)
    placement.fix(3)
    assert placement.launch(1, 0, 0.0) == [StartOn("b", 1, 0)]
    ends, starts = placement.remove_agent("b", "was lost", 1.0)
    assert [(e.worker_id, e.describe()) for e in ends] == [(1, "was lost")]
    assert starts == []
    assert placement.launch(1, 1, 1.0) == []
    assert placement.tick(5.0) == ([], [])
    assert placement.tick(6.5) == ([], [StartOn("a", 1, 1)])


def test_the_replacement_of_an_agent_gets_its_slot_and_the_pending_worker():
    placement = Placement()
    placement.add_agent("a", "one", 0)
    placement.add_agent("b", "two", 1)
    placement.fix(2)
    placement.launch(1, 0, 0.0)
    placement.remove_agent("b", "was lost", 1.0)
    assert placement.launch(1, 1, 1.0) == []
    assert placement.add_agent("c", "one", None) == [], "the slot is on another machine"
    assert placement.add_agent("d", "two", 1) == [StartOn("d", 1, 1)]


def test_without_any_agent_a_worker_fails_with_the_reason():
    placement = Placement(patience_s=5, limit_s=30)
    placement.add_agent("a", "one", None)
    placement.fix(1)
    placement.remove_agent("a", "was lost", 0.0)
    placement.launch(0, 1, 1.0)
    ends, starts = placement.tick(32.0)
    assert starts == []
    assert "within 30 s" in ends[0].describe()


@given(st.permutations(list(range(4))))
def test_agents_get_the_slots_they_were_started_for_in_any_order_of_arrival(order: list[int]) -> None:
    placement = Placement()
    for slot in order:
        placement.add_agent(f"o{slot}", "one", slot)
    placement.fix(4)
    assert placement.slots == ["o0", "o1", "o2", "o3"]
