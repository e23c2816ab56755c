"""Ratings of items by users, from arrays, a sparse matrix, CSV and Parquet.

Here: `Ratings` and its checks. Not here: what an app makes of it (`apps/als.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncline.blocks.tables import read_columns
from syncline.errors import DataError

_COLUMNS = ("user", "item", "rating")


@dataclass(frozen=True)
class Ratings:
    """An entry for each rating: the numbers of its user and item, and its value. Names are those in the data."""

    users: np.ndarray
    items: np.ndarray
    values: np.ndarray
    user_names: np.ndarray
    item_names: np.ndarray

    @classmethod
    def of(cls, data: Any) -> Ratings:
        """The checked ratings in three arrays, a sparse or dense matrix of users by items, or a file that was read."""
        if isinstance(data, Ratings):
            return data
        if hasattr(data, "tocoo"):
            matrix = data.tocoo()
            ends, values, shape = (matrix.row, matrix.col), matrix.data, matrix.shape
            names = tuple(np.arange(length) for length in shape)
            return cls._checked((np.asarray(ends[0]), np.asarray(ends[1])), values, names)
        if isinstance(data, tuple | list) and len(data) == 3:
            found = [np.unique(_names(column), return_inverse=True) for column in data[:2]]
            lengths = sorted({len(np.atleast_1d(np.asarray(column))) for column in data})
            if len(lengths) > 1:
                raise DataError(
                    f"users, items and ratings have lengths {', '.join(map(str, lengths))}, but must be equally long.",
                    code="rating-lengths", lengths=lengths,
                )  # fmt: skip
            return cls._checked((found[0][1], found[1][1]), data[2], (found[0][0], found[1][0]))
        raise DataError(
            "These are no ratings. Pass (users, items, ratings), a sparse matrix of users by items, or a file with the "
            "columns user, item and rating.", code="not-ratings",
        )  # fmt: skip

    @classmethod
    def _checked(cls, ends: tuple[np.ndarray, np.ndarray], values: Any, names: tuple[np.ndarray, ...]) -> Ratings:
        values = np.asarray(values)
        if values.dtype.kind not in "biuf":
            raise DataError(f"Ratings are of type {values.dtype}, but must be numbers.", code="not-numbers")
        values = values.astype(np.float64)
        if not len(values):
            raise DataError("There are no ratings.", code="no-ratings")
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(
                f"Rating {wrong[0]} is {values[wrong[0]]}, and {len(wrong):,} in all are NaN or infinite. Leave them "
                "out.", code="nan-in-data", row=int(wrong[0]), count=len(wrong),
            )  # fmt: skip
        users, items = (np.asarray(end, np.int64) for end in ends)
        keys = users * len(names[1]) + items
        _, first, count = np.unique(keys, return_index=True, return_counts=True)
        if (count > 1).any():
            place = int(first[count > 1][0])
            raise DataError(
                f"User {names[0][users[place]]} has rated item {names[1][items[place]]} more than once, as have "
                f"{int((count > 1).sum()):,} pairs in all. Keep one rating of each pair, or add them up.",
                code="repeated-rating", row=place,
            )  # fmt: skip
        order = np.argsort(keys, kind="stable")
        return cls(users[order], items[order], values[order], np.asarray(names[0]), np.asarray(names[1]))


def _names(column: Any) -> np.ndarray:
    """Numbers stay numbers; what else there is becomes text, which can be saved."""
    names = np.asarray(column)
    return names.astype(str) if names.dtype.kind == "O" else names


def read_ratings(path: Path) -> Ratings:
    """The columns user, item and rating of a file, or else its first three."""
    found = read_columns(path)
    names = _COLUMNS if set(_COLUMNS) <= set(found) else tuple(found)[:3]
    if len(names) < 3:
        raise DataError(
            f"{path} has {len(found)} column(s), but needs three: user, item and rating.", code="rating-columns",
            path=str(path), columns=list(found),
        )  # fmt: skip
    return Ratings.of(tuple(found[name] for name in names))
