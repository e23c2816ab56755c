"""Which blocks of parameters are updated in a round, and by which lane: pure functions of what has changed.

After STRADS, the scheduler of Petuum (J. Kim et al., EuroSys 2016): blocks that change most come first, and no two that
depend on each other are updated at the same time. A *lane* is a sequence of blocks that are updated one after the
other; lanes are computed at the same time, each on some worker. So dependent blocks may share a lane, but are never in
different lanes of one round. What a fit finds depends on the number of lanes, never on the number of workers.

Not here: what a block is and what depends on what (`apps/`), and running the rounds (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from syncline.errors import ConfigError

__all__ = ["Blocks"]

By = Literal["change", "random", "cyclic"]
Related = Callable[[np.ndarray], np.ndarray | None]
"""From the numbers of blocks to a matrix: which of them depend on each other; None if none do."""

_SPARE = 192
"""How many more candidates than places there are. With more, fewer lanes stay short, but more pairs are compared."""
_MOST_KNOWN = 4096
"""The relations between so many blocks are remembered."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How blocks of parameters are scheduled over the workers.

    Attributes:
        size: How many blocks a lane updates in a round. Default: what suits the app.
        by: Which blocks come next: those that changed most lately ("change"), any ("random"), all in turn ("cyclic").
            Default: what suits the app.
        apart: Blocks that are more closely related than this, from 0 to 1, are never updated at the same time.
            Default: 0.3, from the round on in which lanes got in each other's way.
        staleness: How many rounds a lane may continue without the changes of the others.
        lanes: How many sequences of blocks are updated at the same time. Default: the number of workers. With the same
            lanes, any number of workers finds the same.
    """

    size: int | None = None
    by: By | None = None
    apart: float | None = None
    staleness: int = 0
    lanes: int | None = None

    def __post_init__(self) -> None:
        if self.by is not None and self.by not in (allowed := get_args(By)):
            raise ConfigError.for_setting("by", self.by, f"one of {', '.join(allowed)}", allowed=list(allowed))
        for name, least in (("size", 1), ("lanes", 1), ("staleness", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError.for_setting(name, value, f"an integer of {least} or more", least=least)
        apart = 0.3 if self.apart is None else self.apart
        if isinstance(apart, bool) or not isinstance(apart, int | float) or not 0 <= apart <= 1:
            raise ConfigError.for_setting("apart", self.apart, "from 0 to 1")


def pick(
    change: np.ndarray, *, by: By, lanes: int, size: int, related: Related, seed: int, number: int
) -> list[np.ndarray]:
    """The blocks of each lane in round `number`, at most `size` each; `change` is how much each block changed lately.

    By change, blocks that did not change are left out until a survey says otherwise.
    """
    candidates = _candidates(change, by, lanes * size, seed, number)
    if lanes == 1:
        return [candidates[:size]]
    return divide(candidates, related(candidates), lanes, size)


def divide(candidates: np.ndarray, conflicts: np.ndarray | None, lanes: int, size: int) -> list[np.ndarray]:
    """Deal the candidates, the most urgent first, to the lanes so that no two lanes have blocks that conflict.

    A block joins the lane of those that it conflicts with. If these are in several lanes, or there is no room, it has
    to wait for another round.
    """
    if conflicts is None:
        dealt = candidates[: lanes * size]
        return [dealt[lane::lanes] for lane in range(lanes)]
    if conflicts.sum() <= len(candidates):  # each with itself, and no others
        return divide(candidates, None, lanes, size)
    chosen: list[list[int]] = [[] for _ in range(lanes)]
    lane_of = np.full(len(candidates), -1)
    for place in range(len(candidates)):
        near = lane_of[conflicts[place] & (lane_of >= 0)]
        if len(near) == 0:
            lane = min(range(lanes), key=lambda number: len(chosen[number]))
        elif (near == near[0]).all():
            lane = int(near[0])
        else:
            continue
        if len(chosen[lane]) < size:
            chosen[lane].append(int(candidates[place]))
            lane_of[place] = lane
    return [np.array(blocks, np.int64) for blocks in chosen]


class Relations:
    """Remembers which blocks are related: the same ones come round again and again. A pure function of the blocks."""

    def __init__(self, compare: Callable[[np.ndarray, np.ndarray], np.ndarray | None], count: int) -> None:
        """`compare` has the relations of some blocks with others; None if there are none at all."""
        self._compare = compare
        self._known = np.empty(0, np.int64)
        self._place = np.full(count, -1)
        self._matrix = np.zeros((0, 0), bool)
        self._is_free = False
        self.are_checked = True
        """While this is False, all blocks count as unrelated."""

    def __call__(self, blocks: np.ndarray) -> np.ndarray | None:
        """A row and a column for each of these blocks; None if none are related."""
        if self._is_free or not self.are_checked or not len(blocks):
            return None
        new = blocks[self._place[blocks] < 0]
        if len(self._known) + len(new) > _MOST_KNOWN:
            self._place[:] = -1
            self._known, self._matrix, new = np.empty(0, np.int64), np.zeros((0, 0), bool), blocks
        if len(new):
            known = np.concatenate([self._known, new])
            found = self._compare(new, known)
            if found is None:
                self._is_free = True
                return None
            matrix = np.zeros((len(known), len(known)), bool)
            matrix[: len(self._known), : len(self._known)] = self._matrix
            matrix[len(self._known) :] = found
            matrix[:, len(self._known) :] = found.T
            self._place[new] = np.arange(len(self._known), len(known))
            self._known, self._matrix = known, matrix
        places = self._place[blocks]
        return self._matrix[np.ix_(places, places)]


def rotation(blocks: int, lanes: int, number: int) -> list[np.ndarray]:
    """Disjoint blocks for each lane, which move on to the next lane in each round.

    After as many rounds as there are lanes, each lane has had every block once.
    """
    lane_of = (np.arange(blocks) + number) % lanes
    return [np.flatnonzero(lane_of == lane) for lane in range(lanes)]


def rounds_of_a_pass(blocks: int, lanes: int, size: int) -> int:
    """How many rounds it takes to update all blocks once."""
    return max(1, -(-blocks // (lanes * size)))


def _candidates(change: np.ndarray, by: By, places: int, seed: int, number: int) -> np.ndarray:
    """The blocks that may be updated, the most urgent first."""
    count = len(change)
    if by == "cyclic":
        return (np.arange(min(places + _SPARE, count)) + number * places) % count
    if by == "random":
        return np.random.default_rng((seed, number)).permutation(count)[: places + _SPARE]
    active = np.flatnonzero(change > 0)
    if len(active) > places + _SPARE:
        order = np.argpartition(-change[active], places + _SPARE - 1)
        active = np.sort(active[order[: places + _SPARE]])
    return active[np.argsort(-change[active], kind="stable")]
