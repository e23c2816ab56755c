"""Running a vertex program: rounds of batches that are updated together, until nothing changes any more.

A round is a set of vertices (`schedule.py`), divided into batches in which no two depend on each other (`colors.py`).
`Run` computes the own vertices of a part, and waits for its team where others could read or write the same values; it
decides from values that all share, so that nothing needs to be agreed upon. Not here: results (`running.py`).

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
from syncline.graphs.colors import classes
from syncline.graphs.expressions import Places
from syncline.graphs.part import Part, Team
from syncline.graphs.program import VertexProgram
from syncline.graphs.reductions import total
from syncline.graphs.schedule import due
from syncline.graphs.vertices import Vertices, World

_DRIFT = 1e-9
"""How far kept sums may be from sums made anew, relative to the largest one."""


@dataclass
class Run:
    """A program on a part of a graph; `state` holds all that a copy of a round must hold."""

    program: VertexProgram
    part: Part
    colors: np.ndarray
    state: dict[str, np.ndarray]
    """`value`, `pending`, `change` by vertex; `edge.F` by edge; `sum.K` by vertex, the kept sum of gather K."""
    team: Team
    max_rounds: int | None = None
    seed: int = 0
    counters: dict[str, Any] = field(default_factory=lambda: {"rounds": 0, "updates": 0, "edge_updates": 0})

    def __post_init__(self) -> None:
        edges = {name[5:]: array for name, array in self.state.items() if name.startswith("edge.")}
        self.world = World(self.part, {"value": self.state["value"]}, edges, self.seed)
        self._follows = self.program.schedule in ("fifo", "priority")
        if self._follows and self.program.aggregates:
            raise ConfigError(
                f"schedule={self.program.schedule!r} updates vertices whose neighbors have changed, but aggregates "
                "change for all vertices. Use schedule='sweep'.", code="aggregates-and-schedule",
            )  # fmt: skip
        self._all = [np.arange(len(self.colors))] if self.program.consistency == "vertex" else classes(self.colors)
        self._own: Any = slice(None) if self.part.is_whole else self.part.own  # a slice copies nothing
        self._converged = False

    def to_end(self) -> bool:
        """Run until nothing changes by more than `until`, or for `max_rounds`. Whether the former."""
        if "tracks" not in self.counters:
            self.counters["tracks"] = self.program.schedule == "priority" and self._begin_tracking()
        elif self.counters["tracks"]:
            self._trace()  # a run that continues
        while not self._converged and (self.max_rounds is None or self.counters["rounds"] < self.max_rounds):
            self._round()
            self.team.end_round(self.state, self.part.own, self.counters)
        return self._converged

    def _round(self) -> None:
        chosen = due(self.program.schedule, self.state["pending"], self._until())
        if chosen is not None and not len(chosen):
            self._converged = not self.counters["tracks"] or self._is_confirmed()
            return
        self.world.round = self.counters["rounds"]
        self.world.aggregates = {name: f(self.state["value"]) for name, f in self.program.aggregates.items()}
        self.counters["rounds"] += 1
        changed = 0.0
        for batch in self._batches(chosen):
            self._update(batch)
            if not self._follows:
                changed += float((self.state["change"] if batch is None else self.state["change"][batch]).sum())
        if not self._follows:
            self._converged = changed <= self._until() and not self.program.is_sampling

    def _until(self) -> float:
        return self.program.until * (float(np.abs(self.state["value"]).sum()) if self.program.is_relative else 1.0)

    def _batches(self, chosen: np.ndarray | None) -> Sequence[np.ndarray | None]:
        """The vertices to update together, one batch after the other; None is all vertices."""
        are_all = chosen is None or len(chosen) == len(self.colors)
        if are_all and len(self._all) <= 1:
            return [None]
        if are_all:
            return self._all
        return [chosen] if self.program.consistency == "vertex" else classes(self.colors, chosen)

    def _update(self, batch: np.ndarray | None) -> None:
        """Update the vertices of a batch (None: all) from the values before it."""
        world, state, mine = self.world, self.state, self.part.mine(batch)
        rows = self._own if batch is None else mine
        world.known = self._known_sum if self.counters["tracks"] else None
        world.edge_updates, world.gathers = 0, []
        vertices = Vertices(world, mine, are_all=batch is None)
        new = self._checked(self.program(vertices), vertices)
        self.team.wait()  # all have read
        before = self._contributions(rows)
        change = _difference(state["value"][rows], new)
        state["value"][rows] = new
        for gather, old in enumerate(before):
            state[f"delta.{gather}"][rows] = self._contribution(gather, rows) - old
        state["change"][rows] = change
        if vertices.scattered:
            self.team.wait()  # all have written: what is scattered may read the new values of neighbors
            scattered = vertices.computed_edges()
            self.team.wait()
            world.edge_updates += vertices.set_edges(scattered)
        if self._follows:
            self._signal(batch, rows)
        else:
            self.team.wait()  # all have written
        self.counters["updates"] += len(mine)
        self.counters["edge_updates"] += world.edge_updates

    def _signal(self, batch: np.ndarray | None, rows: Any) -> None:
        """Add what the batch has changed to what is pending at the vertices that gather it."""
        state, world = self.state, self.world
        state["pending"][rows] = 0.0
        self.team.wait()  # all have written
        changed = np.flatnonzero(state["change"]) if batch is None else batch[state["change"][batch] > 0]
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
        self.team.wait()  # all know what is pending

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
                self.state[key] = self.team.shared(key, np.zeros((len(self.state["value"]), *sums.shape[1:])))
            self.state[f"sum.{number}"][self.part.own] = sums
        self.team.wait()
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
        return np.array(self.world.gathers[gather].expression.compute(Places(vertices, None, None)), np.float64)

    def _is_confirmed(self) -> bool:
        """Whether little enough is pending, judged by sums made anew from all edges."""
        state, own = self.state, self.part.own
        made = self._sums()
        assert made is not None, "they could be made before"
        state["change"][own] = 0.0
        for number, sums in enumerate(made):
            drift = sums - state[f"sum.{number}"][own]
            state[f"sum.{number}"][own] = sums
            state[f"late.{number}"][own] += drift
            scale = np.maximum(np.abs(sums), np.abs(sums).mean() + 1e-300)
            state["change"][own] += (np.abs(drift) / scale).reshape(len(own), -1).max(axis=1, initial=0.0)
        self.team.wait()
        is_sound = bool((state["change"] <= _DRIFT).all())
        self.team.wait()  # all have read
        if is_sound:
            self._set_pending()
        else:  # a gather depends on more than the values of neighbors, such as on the round
            self.counters["tracks"] = False
            state["pending"][own] = np.inf
        self.team.wait()
        return bool(state["pending"].sum() <= self._until())

    def _set_pending(self) -> None:
        """From the changes of sums since the last update of each vertex."""
        late = [np.abs(self.state[f"late.{number}"][self._own]) for number in range(len(self.world.gathers))]
        self.state["pending"][self._own] = sum(a if a.ndim == 1 else a.reshape(len(a), -1).sum(axis=1) for a in late)

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


def _difference(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """How much each row has changed, in sum; infinite values that stay have not."""
    with np.errstate(invalid="ignore"):
        change = np.abs(np.subtract(new, old, dtype=np.float64))
    if np.isnan(change.sum()):
        change[old == new] = 0.0
    return np.asarray(change if change.ndim == 1 else change.reshape(len(old), -1).sum(axis=1))


def _sums_at(places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The sum of the values of each place, in their order."""
    if values.ndim == 1:
        return np.bincount(places, weights=values, minlength=size)
    made = np.zeros((size, *values.shape[1:]))
    np.add.at(made, places, values)
    return made
