"""CSV: a header and a line for each sample.

Here: reading a file, which is one group, since lines can only be found by reading all before them. Each worker that
needs a file reads it whole; for much data, `syncline data convert` makes parquet of it. Not here: what tables have in
common (`table.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv

from syncline.data.files.columns import Where
from syncline.data.files.store import Store
from syncline.data.files.table import TableFormat
from syncline.errors import DataError

__all__ = ["Csv"]

_FIRST_LINE = 2
"""The line of the first sample, after the header."""


class Csv(TableFormat):
    """A file is one group."""

    name = "csv"
    guesses_types = True

    def open(self, store: Store, path: str) -> _CsvFile:
        """Read it."""
        return _CsvFile(store, path)


class _CsvFile:
    def __init__(self, store: Store, path: str) -> None:
        self._shown = store.shown(path)
        with store.open(path) as handle:
            if not handle.read(1):
                raise DataError(f"{self._shown} is empty: it should begin with a line that names the columns.")
            handle.seek(0)
            # One thread, because only then does Arrow say in which row a mistake is.
            options = pyarrow.csv.ReadOptions(use_threads=False)
            try:
                self._table = pyarrow.csv.read_csv(handle, read_options=options)
            except pa.ArrowInvalid as error:
                raise DataError(_with_line(self._shown, str(error))) from error
        self.schema: pa.Schema = self._table.schema
        self.group_rows: tuple[int, ...] = (len(self._table),)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002  # there is one
        """Some columns."""
        return self._table.select(list(columns))

    def bounds(self, column: str) -> tuple[Any, Any] | None:  # noqa: ARG002  # other formats have statistics
        """It has been read anyway."""
        return None

    def where(self, group: int) -> Where:  # noqa: ARG002  # there is one
        """Lines are counted from 1, as editors do, and the first is the header."""
        return Where(self._shown, "line", _FIRST_LINE)

    def close(self) -> None:
        """Nothing is open."""


def _with_line(shown: str, said: str) -> str:
    said = " ".join(said.split()).removeprefix("CSV parse error: ").rstrip(".")
    row = re.match(r"Row #(\d+): ", said)
    if row is None:
        return f"{shown} is not sound CSV: {said}."
    return f"{shown}, line {row[1]} is not sound CSV: {said[row.end() :]}."
