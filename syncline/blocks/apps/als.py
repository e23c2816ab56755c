"""Matrix factorization by alternating least squares: ratings are products of a user's and an item's factors.

Implicit feedback (Y. Hu, Y. Koren and C. Volinsky, 2008) minimizes sum c (p - x'y)^2 + regularization (|X|^2 + |Y|^2)
over all pairs, where p is 1 and c is `alpha` times the rating for pairs with a rating, and p is 0 and c is 1 for all
others, as the library implicit does. Explicit feedback minimizes sum (r - x'y)^2 over the ratings, and the penalty of a
row counts for each of its ratings (Y. Zhou et al., 2008).

A block is a group of users or of items. All users depend on all items, so rounds alternate between the two; the rows of
one side do not depend on each other, and any lanes find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from syncline.blocks.app import App, Arrays, Round, Verdict, check_count, check_number, share, start_from
from syncline.blocks.ratings import Ratings
from syncline.blocks.schedule import By, Related
from syncline.compute.kernels.factors import solve_rows
from syncline.errors import DataError

_GROUPS = 64
"""Blocks of each side, if it has as many rows."""
_SIDES = ("user", "item")


@dataclass(frozen=True, kw_only=True)
class ALS(App):
    """Factors of users and items."""

    name: ClassVar[str] = "als"
    summary: ClassVar[str] = "factors of users and items from ratings, by alternating least squares"
    data: ClassVar = "ratings"
    tolerance: ClassVar[float] = 1e-4
    max_rounds: ClassVar[int] = 200

    factors: int = 64
    regularization: float = 0.01
    alpha: float = 1.0
    implicit: bool = True

    def __post_init__(self) -> None:
        check_count(self.name, "factors", self.factors)
        check_number(self.name, "regularization", self.regularization, least=0, above=True)
        check_number(self.name, "alpha", self.alpha, least=0, above=True)

    def prepare(self, data: Any) -> Arrays:
        """The ratings by user and by item, and where the blocks of each side begin."""
        ratings = Ratings.of(data)
        if self.implicit and (ratings.values < 0).any():
            place = int(np.argmax(ratings.values < 0))
            raise DataError(
                f"User {ratings.user_names[ratings.users[place]]} has rated item "
                f"{ratings.item_names[ratings.items[place]]} {ratings.values[place]:g}, and "
                f"{int((ratings.values < 0).sum()):,} rating(s) in all are negative. For implicit feedback a rating "
                "says how sure it is that the user likes the item, so it must be 0 or more. Leave these out, or use "
                "als(implicit=False).", code="negative-rating", user=str(ratings.user_names[ratings.users[place]]),
            )  # fmt: skip
        found: Arrays = {"user_names": ratings.user_names, "item_names": ratings.item_names}
        ends = {"user": ratings.users, "item": ratings.items}
        for side, other in (_SIDES, _SIDES[::-1]):
            size = len(found[f"{side}_names"])
            order = np.argsort(ends[side], kind="stable")
            offsets = np.concatenate([[0], np.cumsum(np.bincount(ends[side], minlength=size))])
            found |= {f"{side}_offsets": offsets, f"{side}_entries": ends[other][order]}
            found |= {f"{side}_values": ratings.values[order], f"{side}_bounds": _bounds(offsets)}
        return found

    def count(self, problem: Arrays) -> int:
        return sum(len(problem[f"{side}_bounds"]) - 1 for side in _SIDES)

    def start(self, problem: Arrays, seed: int, warm: Arrays | None) -> Arrays:
        random = np.random.default_rng(seed)
        state: Arrays = {"objective": np.array(np.inf)}
        for side in _SIDES:
            shape = (len(problem[f"{side}_names"]), self.factors)
            drawn = random.normal(scale=1 / np.sqrt(self.factors), size=shape)
            state[side] = drawn if warm is None else np.array(start_from(self.name, warm, f"{side}_factors", shape))
        return state

    def pick(
        self, problem: Arrays, state: Arrays, change: np.ndarray, *, by: By, size: int, related: Related, at: Round
    ) -> list[np.ndarray]:
        """All users, then all items."""
        del state, change, by, size, related
        users = len(problem["user_bounds"]) - 1
        blocks = np.arange(users) if at.number % 2 == 0 else np.arange(users, self.count(problem))
        return [blocks[lane :: at.lanes] for lane in range(at.lanes)]

    def update(self, problem: Arrays, state: Arrays, blocks: np.ndarray, at: Round, lane: int) -> Arrays:
        del lane
        side, other = _SIDES if at.number % 2 == 0 else _SIDES[::-1]
        first = 0 if side == "user" else len(problem["user_bounds"]) - 1
        factors = state[other]
        base = factors.T @ factors if self.implicit else np.zeros((self.factors, self.factors))
        offsets, bounds = problem[f"{side}_offsets"], problem[f"{side}_bounds"]
        found = []
        for block in blocks - first:
            low, high = bounds[block], bounds[block + 1]
            part = slice(offsets[low], offsets[high])
            values = problem[f"{side}_values"][part]
            lengths = np.diff(offsets[low : high + 1])
            weights = self.alpha * values - 1 if self.implicit else np.ones(len(values))
            ridges = np.full(high - low, self.regularization)
            if not self.implicit:
                ridges *= np.maximum(lengths, 1)
            found.append(
                solve_rows(
                    base, factors, offsets[low : high + 1] - offsets[low], problem[f"{side}_entries"][part], weights,
                    self.alpha * values if self.implicit else values, ridges,
                )
            )  # fmt: skip
        return {"rows": np.concatenate(found) if found else np.zeros((0, self.factors))}

    def merge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays], lanes: Sequence[np.ndarray]) -> np.ndarray:
        users = len(problem["user_bounds"]) - 1
        side = "user" if max(blocks.max(initial=0) for blocks in lanes) < users else "item"
        bounds = problem[f"{side}_bounds"]
        change = []
        for part, blocks in zip(found, lanes, strict=True):
            start = 0
            for block in blocks - (0 if side == "user" else users):
                low, high = bounds[block], bounds[block + 1]
                rows = part["rows"][start : start + high - low]
                change.append(float(np.linalg.norm(rows - state[side][low:high])))
                state[side][low:high] = rows
                start += high - low
        return np.array(change)

    def survey_due(self, change: np.ndarray, peak: float, rounds: int, rounds_of_a_pass: int) -> bool:
        del change, peak, rounds_of_a_pass
        return rounds >= 2

    def survey(self, problem: Arrays, state: Arrays, lane: int, lanes: int) -> Arrays:
        """The loss of a part of the users."""
        users, items = state["user"], state["item"]
        rows = share(len(users), lane, lanes)
        offsets = problem["user_offsets"][rows.start : rows.stop + 1]
        part = slice(offsets[0], offsets[-1])
        values, near = problem["user_values"][part], items[problem["user_entries"][part]]
        scores = np.einsum("ij,ij->i", np.repeat(users[rows], np.diff(offsets), axis=0), near)
        if not self.implicit:
            return {"loss": np.array(np.sum((values - scores) ** 2))}
        all_pairs = np.sum((users[rows] @ (items.T @ items)) * users[rows])
        return {"loss": np.array(all_pairs + np.sum(self.alpha * values * (1 - scores) ** 2 - scores**2))}

    def judge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays]) -> Verdict:
        """The gap is the relative improvement since the last survey."""
        loss = float(sum(part["loss"] for part in found))
        penalty = 0.0
        for side in _SIDES:
            counts = 1 if self.implicit else np.maximum(np.diff(problem[f"{side}_offsets"]), 1)
            penalty += float(np.sum(counts * np.sum(state[side] ** 2, axis=1)))
        objective = loss + self.regularization * penalty
        before = float(state["objective"])
        state["objective"] = np.array(objective)
        gap = (before - objective) / max(objective, np.finfo(np.float64).tiny) if np.isfinite(before) else np.inf
        metrics = {} if self.implicit else {"rmse": float(np.sqrt(loss / len(problem["user_values"])))}
        return Verdict(objective=objective, gap=max(gap, 0.0), metrics=metrics)

    def result(self, problem: Arrays, state: Arrays) -> Arrays:
        return {
            "user_factors": state["user"], "item_factors": state["item"], "user_names": problem["user_names"],
            "item_names": problem["item_names"],
        }  # fmt: skip

    def predict(self, result: Arrays, data: Any) -> np.ndarray:
        """The score of each pair in (users, items), by the names in the ratings."""
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise DataError("Pass (users, items), a pair of equally long lists.", code="not-pairs")
        rows = []
        for side, names in zip(_SIDES, data, strict=True):
            known = result[f"{side}_names"]
            order = np.argsort(known)
            wanted = np.asarray(names)
            places = order[np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)]
            if (known[places] != wanted).any():
                unknown = wanted[known[places] != wanted][0]
                raise DataError(
                    f"There were no ratings of {side} {unknown!r}.", code="unknown-rated", name=str(unknown)
                )
            rows.append(result[f"{side}_factors"][places])
        return np.asarray(np.einsum("ij,ij->i", *rows))

    def describe(self, result: Arrays, names: Sequence[str]) -> list[str]:
        """The sizes."""
        del names
        users, items = len(result["user_factors"]), len(result["item_factors"])
        return [f"{self.factors} factors of {users:,} users and {items:,} items"]


def _bounds(offsets: np.ndarray) -> np.ndarray:
    """Where blocks of rows begin, with about as many ratings each."""
    rows = len(offsets) - 1
    work = offsets + 8 * np.arange(rows + 1)  # a row is work without ratings, too
    if rows == 1:
        return np.array([0, 1])
    marks = np.linspace(0, work[-1], min(_GROUPS, rows) + 1)
    inner = np.searchsorted(work, marks[1:-1]).clip(1, rows - 1)
    return np.unique(np.concatenate([[0], inner, [rows]]))
