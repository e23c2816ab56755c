"""Tables: a matrix of features and a column of targets, from arrays, CSV and Parquet.

Here: `Table` and its checks. Not here: what an app makes of it (`apps/`), ratings (`ratings.py`) and texts
(`corpus.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from syncline.errors import ConfigError, DataError, did_you_mean

_FILES = (".parquet", ".csv", ".csv.gz")


@dataclass(frozen=True)
class Table:
    """Rows of features `x`, perhaps with a target `y` each; `columns` names the features."""

    x: np.ndarray
    y: np.ndarray | None = None
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Any, *, targets: Literal["numbers", "classes", "none"]) -> Table:
        """The checked table in a pair of arrays, a matrix, or a table that was read."""
        table = data if isinstance(data, Table) else cls._of_arrays(data)
        x = _numbers(table.x, "X")
        if x.ndim != 2 or not x.size:
            raise DataError(
                f"X has shape {x.shape}, but must be a matrix with a row for each sample and a column for each "
                "feature, and not be empty.", code="not-a-matrix", shape=x.shape,
            )  # fmt: skip
        _check_finite(x, table.columns)
        if targets == "none":
            return cls(x, None, table.columns)
        if table.y is None:
            raise DataError(
                "There are no targets. Pass data=(X, y), or name the column of a table with --target.",
                code="no-target",
            )  # fmt: skip
        y = np.asarray(table.y)
        if y.shape != (len(x),):
            raise DataError(
                f"y has shape {y.shape} and X {len(x):,} rows: there must be one target for each row.",
                code="target-shape", shape=y.shape, rows=len(x),
            )  # fmt: skip
        if targets == "numbers":
            y = _numbers(y, "y")
            _check_finite(y[:, None], ("y",))
        return cls(x, y, table.columns)

    @classmethod
    def _of_arrays(cls, data: Any) -> Table:
        if isinstance(data, tuple | list) and len(data) == 2 and np.ndim(data[0]) == 2:
            return cls(_dense(data[0]), _dense(data[1]))
        return cls(_dense(data))


def read_table(path: Path, target: str | None) -> Table:
    """The table in a CSV or Parquet file; the column `target` becomes the targets."""
    found = read_columns(path)
    y = None
    if target is not None:
        if target not in found:
            raise DataError(
                f"{path} has no column {target!r}. {did_you_mean(target, found) or 'It has no columns.'}",
                code="no-such-column", path=str(path), column=target, columns=list(found),
            )  # fmt: skip
        y = found.pop(target)
    words = [name for name, values in found.items() if values.dtype.kind not in "biuf"]
    if words:
        raise DataError(
            f"{path} has columns that are not numbers: {', '.join(map(repr, words[:5]))}"
            f"{' and others' if len(words) > 5 else ''}. Leave them out of the file, or encode them as numbers.",
            code="not-numbers", path=str(path), columns=words,
        )  # fmt: skip
    if not found:
        raise DataError(f"{path} has no columns besides the target.", code="no-features", path=str(path))
    return Table(np.column_stack(list(found.values())), y, tuple(found))


def read_columns(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The columns of a CSV or Parquet file by name; missing values become NaN. `names`: there is no header line."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if not path.is_file():
        raise DataError(f"There is no file {path}.", code="no-file", path=str(path))
    if not path.name.endswith(_FILES):
        raise DataError(
            f"{path} is not a table that can be read: its name must end in {', '.join(_FILES)}.",
            code="table-format", path=str(path),
        )  # fmt: skip
    try:
        options = csv.ReadOptions(column_names=names)
        table = parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path, read_options=options)
        return {name: table[name].to_numpy() for name in table.column_names}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, KeyError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}", code="unreadable", path=str(path)) from error


def check_width(app: str, x: np.ndarray, expected: int) -> None:
    """`DataError` unless new data has as many columns as the data of the fit."""
    if x.shape[1] != expected:
        raise DataError(
            f"The data has {x.shape[1]:,} columns, but {app} was fitted to {expected:,}.", code="another-shape",
            columns=x.shape[1], expected=expected,
        )  # fmt: skip


def _dense(values: Any) -> np.ndarray:
    if hasattr(values, "toarray"):
        raise ConfigError(
            "X is a sparse matrix, which this app does not take. Pass X.toarray() if it fits into memory.",
            code="sparse-matrix",
        )  # fmt: skip
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu()
    return np.asarray(values)


def _numbers(values: np.ndarray, name: str) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"{name} has values of type {values.dtype}, but must have numbers.", code="not-numbers", field=name,
        )  # fmt: skip
    return values


def _check_finite(x: np.ndarray, columns: Sequence[str]) -> None:
    if x.dtype.kind != "f" or np.isfinite(x.sum(dtype=np.float64)):  # a sum is NaN or infinite if any value is
        return
    wrong = np.argwhere(~np.isfinite(x))
    if not len(wrong):
        return  # the sum has overflowed
    row, column = map(int, wrong[0])
    name = repr(columns[column]) if columns else str(column)
    raise DataError(
        f"Row {row}, column {name} is {x[row, column]}, and {len(wrong):,} value(s) in all are NaN or infinite. Fill "
        "them in, or leave out these rows.", code="nan-in-data", row=row, column=column, count=len(wrong),
    )  # fmt: skip
