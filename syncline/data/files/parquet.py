"""Parquet: a file is a list of row groups, each read separately.

Here: opening a file and reading a row group. Not here: what tables have in common (`table.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from syncline.data.files.columns import Where
from syncline.data.files.store import Store
from syncline.data.files.table import TableFormat
from syncline.errors import DataError


class Parquet(TableFormat):
    """Row groups; the footer of a file says how many rows each has."""

    name = "parquet"

    def open(self, store: Store, path: str) -> _ParquetFile:
        return _ParquetFile(store, path)


class _ParquetFile:
    def __init__(self, store: Store, path: str) -> None:
        self._shown = store.shown(path)
        self._store = store
        file = store.open(path)
        try:
            self._file = pq.ParquetFile(file)
            self.schema: pa.Schema = self._file.schema_arrow
        except Exception as error:  # Arrow's, and the store's
            file.close()
            raise _not_parquet(self._shown, store.size(path), error) from error
        metadata = self._file.metadata
        self.group_rows = tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Only these columns of this row group."""
        try:
            table = self._file.read_row_group(group, columns=list(columns), use_threads=False)
        except Exception as error:
            raise DataError(f"{self._shown}, row group {group} is corrupt: {_first_line(error)}.") from error
        if len(table) != self.group_rows[group]:
            raise DataError(
                f"{self._shown}, row group {group} is corrupt: it has {len(table)} rows instead of "
                f"{self.group_rows[group]}."
            )
        return table

    def bounds(self, column: str) -> tuple[Any, Any] | None:
        """From the statistics of the row groups, if all have them."""
        metadata = self._file.metadata
        at = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column]
        found = []
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(at[0]).statistics if at else None
            if statistics is None or not statistics.has_min_max:
                return None
            found.append((statistics.min, statistics.max))
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None

    def where(self, group: int) -> Where:
        """Rows are counted from 0 in their row group."""
        return Where(f"{self._shown}, row group {group}")

    def close(self) -> None:
        self._file.close(force=True)


def _not_parquet(shown: str, size: int, error: Exception) -> DataError:
    if size == 0:
        return DataError(f"{shown} is empty: 0 bytes instead of a Parquet file.")
    return DataError(f"{shown} is not a valid Parquet file ({size} bytes): {_first_line(error)}.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
