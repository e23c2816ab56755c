"""K-means: Lloyd's algorithm (S. Lloyd, 1982), from a start by k-means++ (D. Arthur and S. Vassilvitskii, 2007).

Minimizes the sum of squared distances of the rows to the nearest of `clusters` centers. A block is a group of rows; in
each round every lane assigns its rows to the nearest centers and adds them up, and the centers become the means. Sums
are merged block by block, in the order of blocks, so any lanes find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from syncline.blocks.app import App, Arrays, Round, Verdict, check_count, share, start_from
from syncline.blocks.tables import Table, check_width
from syncline.errors import DataError

_GROUPS = 64
"""Blocks, if there are as many rows."""


@dataclass(frozen=True, kw_only=True)
class KMeans(App):
    """Centers of clusters of rows."""

    name: ClassVar[str] = "k-means"
    summary: ClassVar[str] = "centers of clusters of rows"
    data: ClassVar = "table"
    tolerance: ClassVar[float] = 1e-6
    max_rounds: ClassVar[int] = 300

    clusters: int = 8

    def __post_init__(self) -> None:
        check_count(self.name, "clusters", self.clusters)

    def prepare(self, data: Any) -> Arrays:
        """The rows; a column of targets is left aside."""
        x = np.ascontiguousarray(Table.of(data, targets="none").x, np.float64)
        if len(x) < self.clusters:
            raise DataError(
                f"There are {len(x):,} rows for {self.clusters:,} clusters. Use k-means(clusters={len(x)}) or fewer.",
                code="too-few-rows", rows=len(x), clusters=self.clusters,
            )  # fmt: skip
        return {"x": x}

    def count(self, problem: Arrays) -> int:
        return min(_GROUPS, len(problem["x"]))

    def start(self, problem: Arrays, seed: int, warm: Arrays | None) -> Arrays:
        shape = (self.clusters, problem["x"].shape[1])
        centers = _spread(problem["x"], self.clusters, seed)
        if warm is not None:
            centers = np.array(start_from(self.name, warm, "centers", shape))
        return {"centers": centers, "inertia": np.array(np.inf)}

    def update(self, problem: Arrays, state: Arrays, blocks: np.ndarray, at: Round, lane: int) -> Arrays:
        del at, lane
        sums = np.zeros((len(blocks), *state["centers"].shape))
        counts = np.zeros((len(blocks), self.clusters))
        for place, block in enumerate(blocks):
            rows = problem["x"][share(len(problem["x"]), int(block), self.count(problem))]
            nearest = _distances(rows, state["centers"]).argmin(axis=1)
            counts[place] = np.bincount(nearest, minlength=self.clusters)
            np.add.at(sums[place], nearest, rows)
        return {"sums": sums, "counts": counts}

    def merge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays], lanes: Sequence[np.ndarray]) -> np.ndarray:
        del problem
        order = np.argsort(np.concatenate(lanes))
        sums = np.concatenate([part["sums"] for part in found])[order].sum(axis=0)
        counts = np.concatenate([part["counts"] for part in found])[order].sum(axis=0)
        used = counts > 0  # the center of an empty cluster stays where it is
        state["centers"][used] = sums[used] / counts[used, None]
        return np.ones(len(order))

    def survey(self, problem: Arrays, state: Arrays, lane: int, lanes: int) -> Arrays:
        count = self.count(problem)
        part = share(count, lane, lanes)
        blocks = [problem["x"][share(len(problem["x"]), block, count)] for block in range(part.start, part.stop)]
        return {"inertia": np.array([_distances(rows, state["centers"]).min(axis=1).sum() for rows in blocks])}

    def judge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays]) -> Verdict:
        """The gap is the relative improvement since the last survey."""
        del problem
        inertia = float(np.concatenate([part["inertia"] for part in found]).sum())
        before, state["inertia"] = float(state["inertia"]), np.array(inertia)
        gap = (before - inertia) / inertia if inertia > 0 and np.isfinite(before) else float(inertia > 0)
        return Verdict(objective=inertia, gap=max(gap, 0.0))

    def result(self, problem: Arrays, state: Arrays) -> Arrays:
        return {"centers": state["centers"], "labels": _distances(problem["x"], state["centers"]).argmin(axis=1)}

    def predict(self, result: Arrays, data: Any) -> np.ndarray:
        """The cluster of each row."""
        x = np.asarray(Table.of(data, targets="none").x, np.float64)
        check_width(self.name, x, result["centers"].shape[1])
        return np.asarray(_distances(x, result["centers"]).argmin(axis=1))

    def describe(self, result: Arrays, names: Sequence[str]) -> list[str]:
        """The sizes of the clusters."""
        del names
        sizes = np.bincount(result["labels"], minlength=self.clusters)
        return [f"{len(sizes):,} clusters of {', '.join(f'{size:,}' for size in np.sort(sizes)[::-1][:20])} rows"]


def _distances(rows: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """The squared distance of each row to each center."""
    squares = (rows**2).sum(axis=1)[:, None] - 2 * rows @ centers.T + (centers**2).sum(axis=1)
    return np.asarray(np.maximum(squares, 0.0))


def _spread(x: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Rows that are likely to be far from each other."""
    random = np.random.default_rng(seed)
    centers = [x[random.integers(len(x))]]
    nearest = _distances(x, centers[0][None])[:, 0]
    for _ in range(clusters - 1):
        total = nearest.sum()
        chosen = random.choice(len(x), p=nearest / total) if total > 0 else random.integers(len(x))
        centers.append(x[chosen])
        nearest = np.minimum(nearest, _distances(x, centers[-1][None])[:, 0])
    return np.array(centers)
