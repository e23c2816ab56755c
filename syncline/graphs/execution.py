"""Running a vertex program: rounds of batches that are updated together, until nothing changes any more.

A round is a set of vertices (`schedule.py`), divided into batches in which no two depend on each other (`colors.py`).
`Run` computes the own vertices of a part. After each batch it exchanges with its team what has changed, and all decide
from the same sums, so that the parts do together what one process would do. Not here: results (`running.py`), and parts
that do not wait for each other (`asynchronous.py`).

Change tracking (the "delta caching" of PowerGraph, J. Gonzalez et al., OSDI 2012, section 4.2): if a program's gathers
are sums of functions of the neighbor, a round adds the changes of these functions to sums that are kept, and reads no
other edges. At the end the sums are made anew from all edges. If they differ by more than rounding, the gathers depend
on something else, too, and the run continues without tracking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncline.errors import ConfigError, DataError
from syncline.graphs.colors import by_color
from syncline.graphs.expressions import Places
from syncline.graphs.part import Part, State, Team
from syncline.graphs.program import VertexProgram
from syncline.graphs.reductions import total
from syncline.graphs.schedule import due
from syncline.graphs.vertices import Vertices, World

_DRIFT = 1e-9
"""How far kept sums may be from sums made anew, relative to the largest one."""


@dataclass
class Run:
    """A program on a part of a graph; `state` and `counters` hold all that a run continues from."""

    program: VertexProgram
    part: Part
    colors: np.ndarray
    state: State
    """`value`, `pending`, `change` by vertex; `edge.F` by edge; by vertex the kept sum of gather K, `sum.K`, how much
    of it came after the last update, `late.K`, and what the last batch added, `delta.K`."""
    team: Team
    max_rounds: int | None = None
    seed: int = 0
    counters: dict[str, Any] = field(default_factory=lambda: {"rounds": 0, "updates": 0, "edge_updates": 0})

    def __post_init__(self) -> None:
        edges = {name[5:]: array for name, array in self.state.items() if name.startswith("edge.")}
        self.world = World(self.part, {"value": self.state["value"]}, edges, self.seed)
        self._follows = self.program.schedule in ("fifo", "priority")
        check_aggregates(self.program)
        self._colors = 1 if self.program.consistency == "vertex" else int(self.colors.max(initial=0)) + 1
        self._own: Any = slice(None) if self.part.is_whole else self.part.own  # a slice copies nothing
        self._all: list[np.ndarray | None] = [None]
        if self._colors > 1:
            self._all = [*by_color(self.colors, self.part.own, self._colors)]
        self._converged = False

    def to_end(self) -> bool:
        """Run until nothing changes by more than `until`, or for `max_rounds`. Whether the former."""
        if "tracks" not in self.counters:
            self.counters["tracks"] = self.program.schedule == "priority" and self._begin_tracking()
        elif self.counters["tracks"]:
            self._trace()  # a run that continues
        goes_on = True
        while goes_on and not self._converged and not self._is_at_limit():
            self._round()
            goes_on = self.team.end_round(self.state, self.counters)
        return self._converged

    def _is_at_limit(self) -> bool:
        return self.max_rounds is not None and self.counters["rounds"] >= self.max_rounds

    def _round(self) -> None:
        batches = self._batches()
        if batches is None:
            self._converged = not self.counters["tracks"] or self._is_confirmed()
            return
        self.world.round = self.counters["rounds"]
        for name, function in self.program.aggregates.items():
            self.world.aggregates[name] = self.team.aggregate(function, self.state["value"], self.part.own)
        self.counters["rounds"] += 1
        for batch in batches:
            self._update(batch)
        if not self._follows:  # every vertex was updated once
            changed = self.team.total(self.state["change"][self._own])
            self._converged = changed <= self._until() and not self.program.is_sampling

    def _until(self) -> float:
        if not self.program.is_relative:
            return self.program.until
        return self.program.until * self.team.total(np.abs(self.state["value"][self._own]))

    def _batches(self) -> Sequence[np.ndarray | None] | None:
        """The own vertices to update together, one batch after the other; None is all vertices of the graph.

        All workers have as many batches, some of them empty. None: nothing is left to do.
        """
        if not self._follows:
            return self._all
        pending, size = self.state["pending"][self._own], self.part.graph.size
        places = due(self.program.schedule, pending, self._until(), size=size, total=self.team.total)
        chosen = self.part.own[places]
        here = np.array([len(chosen)]) if self._colors == 1 else np.bincount(self.colors[chosen], None, self._colors)
        counts = self.team.counts(here)
        if not counts.any():
            return None
        if counts.sum() == size:
            return self._all
        if self._colors == 1:
            return [chosen]
        batches = by_color(self.colors, chosen, self._colors)
        return [batch for batch, count in zip(batches, counts, strict=True) if count]

    def _update(self, batch: np.ndarray | None) -> None:
        """Update the vertices of a batch (None: all) from the values before it."""
        world, state, tracks = self.world, self.state, self.counters["tracks"]
        mine = self.part.own if batch is None else batch
        rows = self._own if batch is None else batch
        world.known = self._known_sum if tracks else None
        world.edge_updates, world.gathers = 0, []
        vertices = Vertices(world, mine, are_all=batch is None)
        new = self._checked(self.program(vertices), vertices)
        before = self._contributions(rows)
        change = _difference(state["value"][rows], new)
        state["value"][rows] = new
        for gather, old in enumerate(before):
            with np.errstate(invalid="ignore"):
                state[f"delta.{gather}"][rows] = self._contribution(gather, rows) - old
        state["change"][rows] = change
        changed = mine
        if self._follows or not self.part.is_whole:
            changed = self.team.share(state, self._shared(vertices), mine[change > 0])
        if vertices.scattered:
            scattered = vertices.computed_edges()
            world.edge_updates += vertices.set_edges(scattered)
            names = {name for _, fields in vertices.scattered for name in fields}
            edges = [edges for _, edges, _ in scattered]
            self.team.share_edges(world.edges, sorted(names), np.unique(np.concatenate(edges)))
        if self._follows:
            self._signal(rows, changed)
        self.counters["updates"] += len(mine)
        self.counters["edge_updates"] += world.edge_updates

    def _shared(self, vertices: Vertices) -> list[str]:
        """What others need of changed vertices: with kept sums only what these have to add to them."""
        if self.counters["tracks"]:
            deltas = [f"delta.{gather}" for gather in range(len(self.world.gathers))]
            return [*deltas, "value"] if vertices.scattered else deltas
        return ["value", "change"] if self._follows else ["value"]

    def _signal(self, rows: Any, changed: np.ndarray) -> None:
        """Add what the batch has changed to what is pending at the own vertices that gather it."""
        state, world = self.state, self.world
        state["pending"][rows] = 0.0
        if self.counters["tracks"]:
            for number, gather in enumerate(world.gathers):
                places, counts = self._read_by(gather.direction, changed)
                deltas = state[f"delta.{number}"][changed]
                added = _sums_at(places, np.repeat(deltas, counts, axis=0), len(state["pending"]))
                state[f"sum.{number}"][self._own] += added[self._own]
                state[f"late.{number}"][rows] = 0.0
                state[f"late.{number}"][self._own] += added[self._own]
                world.edge_updates += len(places)
            self._set_pending()
        else:
            for direction in {gather.direction for gather in world.gathers}:
                places, counts = self._read_by(direction, changed)
                added = _sums_at(places, np.repeat(state["change"][changed], counts), len(state["pending"]))
                state["pending"][self._own] += added[self._own]
                world.edge_updates += len(places)

    def _read_by(self, direction: str, changed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        readers = self.part.readers(direction)
        places, counts = readers.pick(changed)
        return readers.others[places], counts

    def _begin_tracking(self) -> bool:
        """Make the sums of all gathers from all edges. False if the program's gathers do not allow it."""
        made = self._sums()
        if made is None:
            return False
        for number, sums in enumerate(made):
            for name in ("sum", "late", "delta"):
                key = f"{name}.{number}"
                self.state[key] = np.zeros((len(self.state["value"]), *sums.shape[1:]))
            self.state[f"sum.{number}"][self.part.own] = sums
        return True

    def _trace(self) -> None:
        """Call the program without using what it returns, to know its gathers."""
        self.world.known, self.world.gathers = None, []
        self.program(Vertices(self.world, self.part.own[:0], are_all=False))

    def _sums(self) -> list[np.ndarray] | None:
        """The sums of all gathers for the own vertices, from their edges; None if they cannot be kept."""
        self._trace()
        gathers = self.world.gathers
        if not gathers or not all(g.is_linear for g in gathers) or self.state["value"].dtype.kind != "f":
            return None
        made = []
        for gather in gathers:
            rows = self.part.rows(gather.direction)
            places, counts = rows.pick(self.part.own)
            where = Places(rows.others[places], None, None)
            made.append(total(np.asarray(gather.expression.compute(where), np.float64), counts))
            self.counters["edge_updates"] += len(places)
        return made

    def _known_sum(self, gather: int, vertices: np.ndarray) -> np.ndarray:
        return np.asarray(self.state[f"sum.{gather}"][vertices])

    def _contributions(self, rows: Any) -> list[np.ndarray]:
        if not self.counters["tracks"]:
            return []
        return [self._contribution(number, rows) for number in range(len(self.world.gathers))]

    def _contribution(self, gather: int, vertices: Any) -> np.ndarray:
        """What these vertices contribute to a sum, to each of their neighbors."""
        with np.errstate(divide="ignore", invalid="ignore"):  # also to none
            return np.array(self.world.gathers[gather].expression.compute(Places(vertices, None, None)), np.float64)

    def _is_confirmed(self) -> bool:
        """Whether little enough is pending, judged by sums made anew from all edges."""
        state, own = self.state, self.part.own
        if not self.part.is_whole:
            self.team.share(state, ["value"], own)
        made = self._sums()
        assert made is not None, "they could be made before"
        change = np.zeros(len(own))
        for number, sums in enumerate(made):
            drift = sums - state[f"sum.{number}"][own]
            state[f"sum.{number}"][own] = sums
            state[f"late.{number}"][own] += drift
            scale = np.maximum(np.abs(sums), self._mean_of(sums) + 1e-300)
            change += _flat(np.abs(drift) / scale).max(axis=1, initial=0.0)
        if self.team.counts(np.array([np.count_nonzero(change > _DRIFT)])).any():
            # A gather depends on more than the values of neighbors, such as on the round.
            self.counters["tracks"] = False
            state["pending"][own] = np.inf
        else:
            self._set_pending()
        return self.team.total(state["pending"][self._own]) <= self._until()

    def _mean_of(self, sums: np.ndarray) -> float:
        return self.team.total(np.abs(sums)) / max(1, self.part.graph.size * int(np.prod(sums.shape[1:])))

    def _set_pending(self) -> None:
        """From the changes of sums since the last update of each vertex."""
        late = [np.abs(self.state[f"late.{number}"][self._own]) for number in range(len(self.world.gathers))]
        self.state["pending"][self._own] = sum(a if a.ndim == 1 else _flat(a).sum(axis=1) for a in late)

    def _checked(self, new: Any, vertices: Vertices) -> np.ndarray:
        """The new values as an array of the right shape, without NaN."""
        value = self.state["value"]
        made = np.asarray(new)
        shape = (len(vertices), *value.shape[1:])
        if made.shape != shape:
            if made.ndim:
                raise ConfigError(
                    f"The vertex program returned the shape {made.shape}, but must return {shape}: a row for each "
                    "vertex, as in initial.", code="program-shape", shape=made.shape, expected=shape,
                )  # fmt: skip
            made = np.broadcast_to(made, shape)
        # The sum is NaN if any value is, and quicker to make.
        if made.dtype.kind == "f" and np.isnan(made.sum()) and np.isnan(made).any():
            row = int(np.argwhere(np.isnan(made))[0][0])
            name = self.part.graph.name(int(vertices.numbers[row]))
            raise DataError(
                f"The vertex program returned NaN for vertex {name} in round {vertices.round + 1}. Check for divisions "
                "by 0, such as by a degree.", code="nan-value", vertex=name, round=vertices.round + 1,
            )  # fmt: skip
        return np.asarray(made.astype(value.dtype, copy=False))


def check_aggregates(program: VertexProgram) -> None:
    """Refuse aggregates where vertices are updated because their neighbors have changed."""
    if program.schedule in ("fifo", "priority") and program.aggregates:
        raise ConfigError(
            f"schedule={program.schedule!r} updates vertices whose neighbors have changed, but aggregates change for "
            "all vertices. Use schedule='sweep'.", code="aggregates-and-schedule",
        )  # fmt: skip


def _difference(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """How much each row has changed, in sum; infinite values that stay have not."""
    with np.errstate(invalid="ignore"):
        change = np.abs(np.subtract(new, old, dtype=np.float64))
    if np.isnan(change.sum()):
        change[old == new] = 0.0
    return np.asarray(change if change.ndim == 1 else _flat(change).sum(axis=1))


def _flat(rows: np.ndarray) -> np.ndarray:
    """One row of numbers for each row, also if there are none."""
    return rows.reshape(len(rows), int(np.prod(rows.shape[1:], dtype=np.int64)))


def _sums_at(places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The sum of the values of each place, in their order."""
    if values.ndim == 1:
        return np.bincount(places, weights=values, minlength=size)
    made = np.zeros((size, *values.shape[1:]))
    np.add.at(made, places, values)
    return made
