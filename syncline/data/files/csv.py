"""CSV: a header, and one line per sample.

Here: reading a file. A file is one group, because finding a line means reading all lines before it. Each worker reads
the whole file; for large data, convert it to Parquet with `syncline data convert`. Not here: what tables have in common
(`table.py`).
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

_FIRST_LINE = 2
"""The line of the first sample, after the header."""


class Csv(TableFormat):
    """A file is one group."""

    name = "csv"
    guesses_types = True

    def open(self, store: Store, path: str) -> _CsvFile:
        return _CsvFile(store, path)


class _CsvFile:
    def __init__(self, store: Store, path: str) -> None:
        self._shown = store.shown(path)
        with store.open(path) as handle:
            if not handle.read(1):
                raise DataError(f"{self._shown} is empty: it should start with a header line that names the columns.")
            handle.seek(0)
            # One thread, because only then does Arrow report the row of an error.
            options = pyarrow.csv.ReadOptions(use_threads=False)
            try:
                self._table = pyarrow.csv.read_csv(handle, read_options=options)
            except pa.ArrowInvalid as error:
                raise DataError(_with_line(self._shown, str(error))) from error
        self.schema: pa.Schema = self._table.schema
        self.group_rows: tuple[int, ...] = (len(self._table),)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002  # there is only one
        return self._table.select(list(columns))

    def bounds(self, column: str) -> tuple[Any, Any] | None:  # noqa: ARG002  # other formats have statistics
        """The whole file is in memory anyway."""
        return None

    def where(self, group: int) -> Where:  # noqa: ARG002  # there is only one
        """Lines are counted from 1, as in editors, and the first is the header."""
        return Where(self._shown, "line", _FIRST_LINE)

    def close(self) -> None: ...


def _with_line(shown: str, said: str) -> str:
    said = " ".join(said.split()).removeprefix("CSV parse error: ").rstrip(".")
    row = re.match(r"Row #(\d+): ", said)
    if row is None:
        return f"{shown} is not valid CSV: {said}."
    return f"{shown}, line {row[1]} is not valid CSV: {said[row.end() :]}."
