"""The rounds of a fit, the same on every worker: pick blocks, update them lane by lane, merge, and survey.

Here: `Fitting`, and `Team`, through which workers pass on what their lanes found. Every worker keeps the whole state
and merges all updates in the same order, so all copies have the same bits, whichever worker computed a lane. So
recovery is simple: the lanes of a worker that failed are computed again by the others, or by its replacement.

Not here: what is computed (`apps/`), which blocks (`schedule.py`), processes and checkpoints
(`workers/block_worker.py`, `fitting.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from syncline.blocks.app import Arrays, Round, Verdict
from syncline.blocks.fit_task import BlockFit
from syncline.blocks.schedule import Relations, rounds_of_a_pass

COUNTERS = "counters"
"""The entry of a saved state with the numbers of rounds and surveys."""
CHANGE, PEAK = "change", "peak"
_APART = 0.3


class Team(Protocol):
    """The workers of a fit, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every worker's payload, in the order of ranks."""


class Alone:
    """A team of one."""

    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Its own."""
        return [payload]


@dataclass(frozen=True)
class Status:
    """How far a fit is, after a survey."""

    round: int
    verdict: Verdict
    has_converged: bool
    updates: int
    """How many blocks have been updated so far."""
    seconds: float


class Fitting:
    """A fit in progress. `state` is the same on every worker between two rounds."""

    def __init__(self, fit: BlockFit, state: Arrays | None = None) -> None:
        """`state` is one that `saved` returned."""
        self.fit = fit
        blocks = fit.blocks
        assert blocks.lanes is not None, "settled"
        assert blocks.size is not None, "settled"
        assert blocks.by is not None, "settled"
        self._lanes, self._size, self._by = blocks.lanes, blocks.size * (1 + blocks.staleness), blocks.by
        count = fit.app.count(fit.problem)
        apart = _APART if blocks.apart is None else blocks.apart
        self._relations = Relations(lambda some, others: fit.app.related(fit.problem, some, others, apart), count)
        self._pass = rounds_of_a_pass(count, self._lanes, self._size)
        self._started = time.perf_counter()
        self.objectives: list[tuple[int, float]] = []
        """(round, objective) of each survey in this process."""
        if state is None:
            self.state = fit.app.start(fit.problem, fit.seed, fit.warm)
            self._change, self._peak = np.full(count, np.inf), np.inf
            self.round = self.surveyed_at = self.updates = self.surveys = 0
            self._is_new = True
        else:
            self.restore(state)

    def restore(self, saved: Arrays) -> None:
        """Continue from a saved state."""
        state = {name: array.copy() for name, array in saved.items()}
        self._change, self._peak = state.pop(CHANGE), float(state.pop(PEAK))
        self.round, self.surveyed_at, self.updates, self.surveys = map(int, state.pop(COUNTERS))
        self.state = state
        self._is_new = self.surveys == 0

    def saved(self) -> Arrays:
        """All that is needed to continue from here; nothing is copied."""
        counters = np.array([self.round, self.surveyed_at, self.updates, self.surveys])
        return {**self.state, CHANGE: self._change, PEAK: np.array(self._peak), COUNTERS: counters}

    @property
    def is_at_limit(self) -> bool:
        return self.round >= self.fit.max_rounds

    def step(self, team: Team) -> Status | None:
        """A survey if it is due, else a round. All workers call this together; if it fails, nothing has changed."""
        if self._survey_is_due():
            return self._survey(team)
        self._round(team)
        return None

    def _survey_is_due(self) -> bool:
        if self._is_new:
            return True
        since = self.round - self.surveyed_at
        return since > 0 and (self.is_at_limit or self.fit.app.survey_due(self._change, self._peak, since, self._pass))

    def _survey(self, team: Team) -> Status:
        app, problem = self.fit.app, self.fit.problem
        found = self._by_lane(team, lambda lane: app.survey(problem, self.state, lane, self._lanes))
        verdict = app.judge(problem, self.state, found)
        if verdict.change is not None:
            self._change = verdict.change
        self._peak = float(self._change.max(initial=0.0))
        self._is_new = False
        self.surveys += 1
        self.surveyed_at = self.round
        self.objectives.append((self.round, verdict.objective))
        is_still = self._by == "change" and self._peak == 0.0
        return Status(
            self.round, verdict, verdict.gap <= self.fit.tolerance or is_still, self.updates,
            time.perf_counter() - self._started,
        )  # fmt: skip

    def _round(self, team: Team) -> None:
        fit = self.fit
        at = Round(self.round, self._lanes, fit.seed)
        self._relations.are_checked = fit.blocks.apart is not None or fit.app.is_crowded(self.state)
        lanes = fit.app.pick(
            fit.problem, self.state, self._change, by=self._by, size=self._size, at=at,
            related=self._relations,
        )  # fmt: skip
        found = self._by_lane(team, lambda lane: fit.app.update(fit.problem, self.state, lanes[lane], at, lane))
        change = fit.app.merge(fit.problem, self.state, found, lanes)
        blocks = np.concatenate(lanes)
        self._change[blocks] = change
        self.updates += len(blocks)
        self.round += 1

    def _by_lane(self, team: Team, compute: Callable[[int], Arrays]) -> list[Arrays]:
        """What `compute` finds for each lane, computed by the workers in turn."""
        own = range(team.rank, self._lanes, team.size)
        if team.size == 1:
            return [compute(lane) for lane in own]
        gathered = [unpack(payload) for payload in team.all_gather(pack([compute(lane) for lane in own]))]
        return [gathered[lane % team.size][lane // team.size] for lane in range(self._lanes)]


def pack(parts: Sequence[Arrays]) -> bytes:
    """Arrays as bytes."""
    plain = [
        {name: (str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()) for name, array in part.items()}
        for part in parts
    ]
    return msgspec.msgpack.encode(plain)


def unpack(payload: bytes) -> list[Arrays]:
    """The arrays that were packed."""
    return [
        {name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in part.items()}
        for part in msgspec.msgpack.decode(payload)
    ]
