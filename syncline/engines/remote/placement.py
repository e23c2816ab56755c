"""Which agent has which slot, and where each worker runs: pure decisions, no sockets and no clock.

Here: `Placement`. Events in, `StartOn` and `Exit` out. A run has a fixed number of slots, each on a machine; a worker's
id decides its slot. When an agent is gone, so are its workers, and its slot is free for the next agent on that machine:
the retry of a Spark task, the replacement of a Ray actor, a process that is started by hand. If none comes in time,
another agent runs the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.engines.engine import Exit


@dataclass(frozen=True)
class StartOn:
    """Start this life of a worker on this agent."""

    agent: str
    worker_id: int
    life: int


@dataclass(frozen=True)
class _PendingStart:
    life: int
    since: float


class Placement:
    """`patience_s`: how long a worker waits for its own slot; `limit_s`: for any."""

    def __init__(self, *, patience_s: float = 15.0, limit_s: float = 120.0) -> None:
        self._patience_s, self._limit_s = patience_s, limit_s
        self.machines: dict[str, str] = {}
        """The connected agents, in the order of their arrival, and their machines."""
        self.slots: list[str | None] = []
        """The agent of each slot, once these are `fixed`."""
        self._machine_of_slot: list[str] = []
        self._wanted_slot: dict[str, int | None] = {}
        self._agents: dict[tuple[int, int], str] = {}  # (worker_id, life) -> where it was started
        self._pending: dict[int, _PendingStart] = {}

    def add_agent(self, agent: str, machine: str, slot: int | None) -> list[StartOn]:
        self.machines[agent], self._wanted_slot[agent] = machine, slot
        return self._fill()

    def fix(self, count: int) -> None:
        """Assign `count` slots: agents that were started for a slot get it, the first to arrive get the others."""
        asked = {slot: a for a, slot in reversed(self._wanted_slot.items()) if slot is not None and slot < count}
        others = [a for a in self.machines if a not in asked.values()]
        self.slots = [asked[k] if k in asked else others.pop(0) for k in range(count)]
        self._machine_of_slot = [self.machines[a] for a in self.slots if a is not None]

    def launch(self, worker_id: int, life: int, now: float) -> list[StartOn]:
        self._pending[worker_id] = _PendingStart(life, now)
        return self._place(worker_id, now)

    def on_exit(self, worker_id: int, life: int) -> bool:
        """A worker has ended on its agent. False if that was known already."""
        return self._agents.pop((worker_id, life), None) is not None

    def remove_agent(self, agent: str, reason: str, now: float) -> tuple[list[Exit], list[StartOn]]:
        """An agent is gone, and its workers with it."""
        if agent not in self.machines:
            return [], []
        del self.machines[agent], self._wanted_slot[agent]
        self.slots = [None if a == agent else a for a in self.slots]
        gone = [key for key, where in self._agents.items() if where == agent]
        for key in gone:
            del self._agents[key]
        exits = [Exit(worker_id, 0, None, None, life, reason) for worker_id, life in gone]
        return exits, [*self._fill(), *self._place_pending(now)]

    def agents_for(self, slot: int) -> list[str]:
        """The connected agents that were started for this slot, whichever they have now."""
        return [a for a, wanted in self._wanted_slot.items() if wanted == slot]

    def agent_of(self, worker_id: int) -> str | None:
        """The agent on which this worker runs."""
        return next((a for (w, _), a in reversed(self._agents.items()) if w == worker_id), None)

    def cancel(self, worker_id: int) -> list[Exit]:
        """A worker that was not started yet is not needed any more."""
        pending = self._pending.pop(worker_id, None)
        return [Exit(worker_id, 0, None, None, pending.life, "was not started yet")] if pending else []

    def tick(self, now: float) -> tuple[list[Exit], list[StartOn]]:
        starts, exits = self._place_pending(now), list[Exit]()
        for worker_id, pending in list(self._pending.items()):
            if now - pending.since > self._limit_s:
                del self._pending[worker_id]
                why = f"could not be started within {self._limit_s:g} s: its node is gone, and no other node has room"
                exits.append(Exit(worker_id, 0, None, None, pending.life, why))
        return exits, starts

    def _fill(self) -> list[StartOn]:
        """Assign free slots to agents without one: the slot they were started for, or one on their machine."""
        starts: list[StartOn] = []
        for agent, machine in self.machines.items():
            if agent in self.slots:
                continue
            free = [k for k, a in enumerate(self.slots) if a is None and self._machine_of_slot[k] == machine]
            if free:
                wanted = self._wanted_slot[agent]
                self.slots[wanted if wanted in free else free[0]] = agent
        for worker_id in list(self._pending):
            starts += self._place(worker_id, self._pending[worker_id].since)
        return starts

    def _place_pending(self, now: float) -> list[StartOn]:
        return [start for worker_id in list(self._pending) for start in self._place(worker_id, now)]

    def _place(self, worker_id: int, now: float) -> list[StartOn]:
        """Start it in its own slot or, if that stays empty, on another agent."""
        pending, slot = self._pending[worker_id], worker_id % len(self.slots)
        agent = self.slots[slot]
        if agent is None and now - pending.since > self._patience_s:
            agent = self._alternative(slot)
        if agent is None:
            return []
        del self._pending[worker_id]
        self._agents[worker_id, pending.life] = agent
        return [StartOn(agent, worker_id, pending.life)]

    def _alternative(self, slot: int) -> str | None:
        """The agent with the fewest workers. If all slots are on one machine, workers share its memory: stay there."""
        machine = self._machine_of_slot[slot]
        is_one = len(set(self._machine_of_slot)) == 1
        allowed = [a for a, m in self.machines.items() if m == machine or not is_one]
        return min(
            allowed, key=lambda a: (self.machines[a] != machine, list(self._agents.values()).count(a)), default=None
        )
