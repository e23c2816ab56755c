"""Running a vertex program on parts that do not wait for each other in every round.

Each part updates its inner vertices, which have no neighbor in another part, whenever it likes. Its border waits for
the part's turn. Between two parts with conflicting vertices there is a token; a part whose turn it is has all of its
tokens, updates its border, and passes them on with what has changed. So no two neighbors (with consistency "full": no
two vertices with a common neighbor) are ever updated at once, and each update sees the newest values: the result is
that of some sequential order. At first every token is at the lower part; turns then neither deadlock nor starve (edge
reversal: V. Barbosa and E. Gafni, ACM TOPLAS 11(4), 1989). With consistency "vertex" all vertices are inner ones, and
the tokens only carry what has changed.

After some turns all parts meet, with all messages received: there they find out whether anything is left to do, keep
copies, report and stop. Not here: rounds in which all parts take part (`execution.py`), and sending (`workers/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.colors import by_color
from syncline.graphs.cut import distance_two
from syncline.graphs.execution import Run
from syncline.graphs.graph import Graph
from syncline.graphs.part import State, Team
from syncline.graphs.program import VertexProgram
from syncline.graphs.schedule import due

_TURNS = 8
"""How many turns each part has between two meetings."""


class Turns(Team, Protocol):
    """A team whose parts take turns."""

    def begin(self) -> None:
        """All parts are here: every token is at the lower one of its two parts."""

    def has_turn(self) -> bool:
        """Whether this part has all tokens."""

    def take(self, state: State, *, wait: bool) -> np.ndarray | None:
        """Take a token that has arrived: the vertices that came with it. `wait` for one if there is none."""

    def take_last(self, state: State) -> np.ndarray | None:
        """After the last turn of this part: take the next token that others still have; None if there is none."""

    def give(self, state: State) -> None:
        """Pass all tokens on, with what has changed since the last turn."""


@dataclass
class AsynchronousRun(Run):
    """A program on a part, with a `team` that takes `Turns`. A round is a turn."""

    owners: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_asynchronous(self.program)
        super().__post_init__()
        assert self.owners is not None, "a part belongs to a division"
        rank = int(self.owners[self.part.own[0]]) if len(self.part.own) else -1
        is_border = border(self.part.graph, self.owners, rank, self.program.consistency)
        self._border = self.part.own[is_border[self.part.own]]
        self._inner = self.part.own[~is_border[self.part.own]]
        self._limit = 0.0
        self._is_inner_due = True

    @property
    def _turns(self) -> Turns:
        return cast(Turns, self.team)

    def to_end(self) -> bool:
        self.counters["tracks"] = False
        self.world.round = self.counters["rounds"]
        goes_on = True
        while goes_on and not self._converged and not self._is_at_limit():
            self._limit = self._until()
            for name, function in self.program.aggregates.items():
                self.world.aggregates[name] = self.team.aggregate(function, self.state["value"], self.part.own)
            left = _TURNS if self.max_rounds is None else self.max_rounds - self.counters["rounds"]
            self._take_turns(min(_TURNS, left))
            self._converged = self._has_converged()
            goes_on = self.team.end_round(self.state, self.counters)
        return self._converged

    def _take_turns(self, count: int) -> None:
        self._turns.begin()
        for _ in range(count):
            while not self._turns.has_turn():
                was_busy = self._is_inner_due and self._pass(self._inner)
                self._hear(self._turns.take(self.state, wait=not was_busy))
            self._pass(self._border)
            self._turns.give(self.state)
            self._is_inner_due = True
            self._pass(self._inner)
            self.counters["rounds"] += 1
            self.world.round += 1
        while (heard := self._turns.take_last(self.state)) is not None:
            self._hear(heard)

    def _pass(self, vertices: np.ndarray) -> bool:
        """Update those of these vertices that are due. Whether that changed much."""
        size = self.part.graph.size
        limit = self._limit * len(vertices) / max(size, 1)
        pending = self.state["pending"][vertices]
        places = due(self.program.schedule, pending, limit, size=len(vertices), total=_sum)
        chosen = vertices[places]
        batches = [chosen] if self._colors == 1 else by_color(self.colors, chosen, self._colors)
        changed = 0.0
        for batch in batches:
            if len(batch):
                self._update(batch)
                changed += float(self.state["change"][batch].sum())
        self._is_inner_due = changed > limit
        return self._is_inner_due

    def _hear(self, changed: np.ndarray | None) -> None:
        """Vertices of other parts have changed."""
        if changed is None or not self._follows:
            return
        self._is_inner_due = True
        for direction in {gather.direction for gather in self.world.gathers}:
            places, counts = self._read_by(direction, changed)
            np.add.at(self.state["pending"], places, np.repeat(self.state["change"][changed], counts))

    def _has_converged(self) -> bool:
        """Judged by all parts, when no message is on its way."""
        pending, schedule = self.state["pending"][self.part.own], self.program.schedule
        limit = self._until()
        if schedule == "fifo":
            queued = np.count_nonzero(pending > limit / max(self.part.graph.size, 1))
            return not self.team.counts(np.array([queued])).any()
        return self.team.total(pending if schedule == "priority" else self.state["change"][self.part.own]) <= limit


def _sum(values: np.ndarray) -> float:
    return float(values.sum())


def check_asynchronous(program: VertexProgram) -> None:
    """Refuse what means something only if all vertices have been updated equally often."""
    if program.is_sampling:
        raise ConfigError(
            f"{program.name} draws a sample in each round of all vertices, but asynchronous parts have no rounds in "
            "common. Leave out asynchronous.", code="sampling-asynchronously",
        )  # fmt: skip


def border(graph: Graph, owners: np.ndarray, own: int, consistency: str) -> np.ndarray:
    """Which vertices of a part (True by vertex) must not be updated while another part updates its own."""
    if consistency == "vertex":
        return np.zeros(graph.size, bool)
    if consistency == "full":
        return distance_two(graph, owners, own)
    is_cut = owners[graph.sources] != owners[graph.targets]
    found = np.zeros(graph.size, bool)
    found[graph.sources[is_cut]] = found[graph.targets[is_cut]] = True
    return np.asarray(found & (owners == own))


def conflicts(graph: Graph, owners: np.ndarray, parts: int, consistency: str) -> np.ndarray:
    """Which parts have a token between them (a symmetric matrix): those whose vertices conflict, or are neighbors."""
    touches = np.zeros((graph.size, parts), bool)
    touches[np.arange(graph.size), owners] = True
    if consistency == "full":
        touches[graph.sources, owners[graph.targets]] = touches[graph.targets, owners[graph.sources]] = True
        counts = touches.astype(np.int64)
        found = counts.T @ counts > 0
    else:
        found = np.zeros((parts, parts), bool)
        found[owners[graph.sources], owners[graph.targets]] = found[owners[graph.targets], owners[graph.sources]] = True
    np.fill_diagonal(found, False)
    return np.asarray(found)
