"""From the values of a vertex's edges to one value: sums, extremes, and what local algorithms need besides them.

Here: pure functions of the values, edge by edge, and the number of edges of each vertex. All are vectorised over the
vertices. Not here: which edges (`gathering.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Reduction = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""(values of the edges, number of edges of each vertex, own values of the vertices) -> one row for each vertex."""


def total(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The sum. In the order of the edges, as a product with a sparse matrix has it, so that both give the same bits."""
    del own
    if values.ndim == 1 and values.dtype.kind == "f":
        return np.bincount(_rows(lengths), weights=values, minlength=len(lengths))
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    return _reduced(np.add, values, lengths, 0)


def mean(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The mean; 0 without edges."""
    del own
    count = np.maximum(lengths, 1).reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(total(values.astype(np.float64), lengths) / count)


def least(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The minimum; infinity, or the largest integer, without edges."""
    del own
    return _reduced(np.minimum, values, lengths, _extreme(values.dtype, 1))


def most(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The maximum; minus infinity, or the smallest integer, without edges."""
    del own
    return _reduced(np.maximum, values, lengths, _extreme(values.dtype, -1))


def any_true(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    del own
    return _reduced(np.logical_or, values.astype(bool), lengths, False)


def all_true(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    del own
    return _reduced(np.logical_and, values.astype(bool), lengths, True)


def mode(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The most frequent value. Of several, the own one if it is among them, else the largest; without edges the own."""
    assert own is not None
    rows, values, counts = _counted(values, lengths)
    best = np.zeros(len(lengths), np.int64)
    np.maximum.at(best, rows, counts)
    is_best = counts == best[rows]
    found = own.copy()
    found[rows[is_best]] = values[is_best]  # sorted by value: the largest is written last
    keeps_own = np.zeros(len(lengths), bool)
    keeps_own[rows[is_best & (values == own[rows])]] = True
    return np.where(keeps_own, own, found)


def mex(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The smallest integer from 0 that is not among the values."""
    del own
    rows, values, _ = _counted(values, lengths)
    is_counted = values >= 0
    rows, values = rows[is_counted], values[is_counted]
    place = np.arange(len(rows)) - _starts(rows, len(lengths))[rows]
    found = np.bincount(rows, minlength=len(lengths))  # 0, 1, 2, ... without a gap
    gaps = values != place
    np.minimum.at(found, rows[gaps], place[gaps])
    return found


def h_index(values: np.ndarray, lengths: np.ndarray, own: np.ndarray | None = None) -> np.ndarray:
    """The largest h such that h of the values are at least h, by counting: sorting takes four times as long."""
    del own
    cells = lengths + 1  # for the values 0, 1, ... and the number of edges, or more
    starts = np.cumsum(cells) - cells
    capped = np.clip(values, 0, np.repeat(lengths, lengths)).astype(np.int64)
    counts = np.bincount(np.repeat(starts, lengths) + capped, minlength=int(cells.sum()))
    at_least = np.cumsum(counts[::-1])[::-1]  # so many values, those of later vertices included
    later = np.append(at_least, 0)[starts + cells]
    value = np.arange(len(at_least)) - np.repeat(starts, cells)
    is_reached = at_least - np.repeat(later, cells) >= value
    return np.add.reduceat(is_reached, starts, dtype=np.int64) - 1 if len(starts) else np.zeros(0, np.int64)


REDUCTIONS: dict[str, Reduction] = {
    "sum": total, "mean": mean, "min": least, "max": most, "any": any_true, "all": all_true, "mode": mode, "mex": mex,
    "h_index": h_index,
}  # fmt: skip


def _rows(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


def _starts(rows: np.ndarray, count: int) -> np.ndarray:
    lengths = np.bincount(rows, minlength=count)
    return np.asarray(np.cumsum(lengths) - lengths)


def _counted(values: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different values of each row in order, and how often each is there."""
    rows = _rows(lengths)
    order = np.lexsort((values, rows))
    rows, values = rows[order], values[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (values[1:] != values[:-1])
    firsts = np.flatnonzero(is_first)
    return rows[firsts], values[firsts], np.diff(np.append(firsts, len(rows)))


def _reduced(ufunc: np.ufunc, values: np.ndarray, lengths: np.ndarray, empty: float) -> np.ndarray:
    made = np.full((len(lengths), *values.shape[1:]), empty, values.dtype)
    filled = np.flatnonzero(lengths)
    if len(filled):
        made[filled] = ufunc.reduceat(values, (np.cumsum(lengths) - lengths)[filled], axis=0)
    return made


def _extreme(dtype: np.dtype, sign: int) -> float:
    if dtype.kind == "f":
        return sign * np.inf
    info = np.iinfo(dtype)
    return int(info.max if sign > 0 else info.min)
