"""Which outpost keeps which seat, and where each worker goes: decisions only, no sockets and no clock.

Here: `Roster`. Events in, `Start`s and `Exit`s out. A run has a fixed number of seats, each on a machine; a worker's
number decides its seat. When an outpost is gone, its workers are, and its seat is free for the next one that comes to
that machine: the retry of a Spark task, the replacement of a Ray actor, somebody who joins by hand. Where nobody comes
for a while, another outpost takes the worker in.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.engines.engine import Exit

__all__ = ["Roster", "Start"]


@dataclass(frozen=True)
class Start:
    """Start process `rank` in its `life` at this outpost."""

    outpost: str
    rank: int
    life: int


@dataclass(frozen=True)
class _Awaited:
    life: int
    since: float


class Roster:
    """`patience_s`: how long a worker waits for its own seat; `limit_s`: for any."""

    def __init__(self, *, patience_s: float = 15.0, limit_s: float = 120.0) -> None:
        self._patience_s, self._limit_s = patience_s, limit_s
        self.machines: dict[str, str] = {}
        """Who is here, in the order of coming, and on which machine."""
        self.seats: list[str | None] = []
        """Who keeps each seat, once they are `fixed`."""
        self._machine_of_seat: list[str] = []
        self._wanted_seat: dict[str, int | None] = {}
        self._at: dict[tuple[int, int], str] = {}  # (rank, life) -> where it was started
        self._awaited: dict[int, _Awaited] = {}

    def enrol(self, outpost: str, machine: str, seat: int | None) -> list[Start]:
        """An outpost is here."""
        self.machines[outpost], self._wanted_seat[outpost] = machine, seat
        return self._fill()

    def fix(self, count: int) -> None:
        """From now on there are `count` seats, kept by the first who came; those that were given a seat keep that."""
        asked = {seat: o for o, seat in reversed(self._wanted_seat.items()) if seat is not None and seat < count}
        others = [o for o in self.machines if o not in asked.values()]
        self.seats = [asked[k] if k in asked else others.pop(0) for k in range(count)]
        self._machine_of_seat = [self.machines[o] for o in self.seats if o is not None]

    def launch(self, rank: int, life: int, now: float) -> list[Start]:
        """A process is to be started."""
        self._awaited[rank] = _Awaited(life, now)
        return self._place(rank, now)

    def ended(self, rank: int, life: int) -> bool:
        """A process has ended at its outpost. Whether that is news."""
        return self._at.pop((rank, life), None) is not None

    def gone(self, outpost: str, reason: str, now: float) -> tuple[list[Exit], list[Start]]:
        """An outpost is gone, and all that it kept."""
        if outpost not in self.machines:
            return [], []
        del self.machines[outpost], self._wanted_seat[outpost]
        self.seats = [None if o == outpost else o for o in self.seats]
        lost = [key for key, where in self._at.items() if where == outpost]
        for key in lost:
            del self._at[key]
        exits = [Exit(rank, 0, None, None, life, reason) for rank, life in lost]
        return exits, [*self._fill(), *self._look_again(now)]

    def given(self, seat: int) -> list[str]:
        """Who is here and was given this seat to keep, wherever it sits now."""
        return [o for o, wanted in self._wanted_seat.items() if wanted == seat]

    def where(self, rank: int) -> str | None:
        """The outpost at which this process is."""
        return next((o for (r, _), o in reversed(self._at.items()) if r == rank), None)

    def give_up(self, rank: int) -> list[Exit]:
        """A process that has no place yet is not wanted any more."""
        awaited = self._awaited.pop(rank, None)
        return [Exit(rank, 0, None, None, awaited.life, "was not started yet")] if awaited else []

    def tick(self, now: float) -> tuple[list[Exit], list[Start]]:
        """Time has passed."""
        starts, exits = self._look_again(now), list[Exit]()
        for rank, awaited in list(self._awaited.items()):
            if now - awaited.since > self._limit_s:
                del self._awaited[rank]
                why = f"found no place within {self._limit_s:g} s: its host is gone, and no other has room"
                exits.append(Exit(rank, 0, None, None, awaited.life, why))
        return exits, starts

    def _fill(self) -> list[Start]:
        """Give free seats to those who have none: their own, or one on their machine."""
        starts: list[Start] = []
        for outpost, machine in self.machines.items():
            if outpost in self.seats:
                continue
            free = [k for k, o in enumerate(self.seats) if o is None and self._machine_of_seat[k] == machine]
            if free:
                wanted = self._wanted_seat[outpost]
                self.seats[wanted if wanted in free else free[0]] = outpost
        for rank in list(self._awaited):
            starts += self._place(rank, self._awaited[rank].since)
        return starts

    def _look_again(self, now: float) -> list[Start]:
        return [start for rank in list(self._awaited) for start in self._place(rank, now)]

    def _place(self, rank: int, now: float) -> list[Start]:
        """Start it at its own seat, or after a while where else it may be."""
        awaited, seat = self._awaited[rank], rank % len(self.seats)
        outpost = self.seats[seat]
        if outpost is None and now - awaited.since > self._patience_s:
            outpost = self._elsewhere(seat)
        if outpost is None:
            return []
        del self._awaited[rank]
        self._at[rank, awaited.life] = outpost
        return [Start(outpost, rank, awaited.life)]

    def _elsewhere(self, seat: int) -> str | None:
        """Somebody else, with the fewest processes. Where all are on one machine, so must this one be."""
        machine = self._machine_of_seat[seat]
        is_one = len(set(self._machine_of_seat)) == 1
        may = [o for o, m in self.machines.items() if m == machine or not is_one]
        return min(may, key=lambda o: (self.machines[o] != machine, list(self._at.values()).count(o)), default=None)
