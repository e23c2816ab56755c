"""From the number of a sample to its place: which file, which group of rows in it, which row.

Here: pure functions and `Layout`. A group is what is read in one go: a row group of parquet, a record batch of Arrow,
or a whole file. Not here: reading (`source.py`), or in which order samples are used (`data/order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from syncline.data.files.survey import FileFacts

__all__ = ["Layout", "Place"]


class Place(NamedTuple):
    """Where a sample is."""

    file: int
    group: int
    row: int


class Layout:
    """The rows of some files, numbered from the first of the first file to the last of the last.

    `kept` are the numbers of those that count, ascending, if not all do: sample i is then row kept[i].
    """

    def __init__(self, files: Sequence[FileFacts], kept: np.ndarray | None = None) -> None:
        self._kept = kept
        self._groups = [(file, group) for file, facts in enumerate(files) for group in range(len(facts.group_rows))]
        sizes = [rows for facts in files for rows in facts.group_rows]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))])

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._kept is None else len(self._kept)

    @property
    def group_sizes(self) -> np.ndarray:
        """How many samples are in each group, in order."""
        if self._kept is None:
            return np.diff(self._starts)
        return np.bincount(self._group_of(self._kept), minlength=len(self._groups))

    def place_of(self, index: int) -> Place:
        """Where sample `index` is."""
        row = int(index if self._kept is None else self._kept[index])
        group = int(self._group_of(np.asarray([row]))[0])
        return Place(*self._groups[group], row - int(self._starts[group]))

    def by_group(self, indices: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """(file, group, which of `indices` are there, their rows) for each group that has some of them."""
        rows = indices if self._kept is None else self._kept[indices]
        groups = self._group_of(rows)
        for group in np.unique(groups):
            here = np.flatnonzero(groups == group)
            yield *self._groups[group], here, rows[here] - self._starts[group]

    def _group_of(self, rows: np.ndarray) -> np.ndarray:
        # On the right of equal starts: groups without rows begin where the next one does.
        return np.searchsorted(self._starts, rows, side="right") - 1
