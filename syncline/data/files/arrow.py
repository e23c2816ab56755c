"""Arrow IPC (Feather): a file is a list of record batches, each read separately.

Here: opening a file, in its file form or its stream form, and reading a record batch. Not here: what tables have in
common (`table.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from syncline.data.files.columns import Where
from syncline.data.files.store import Store
from syncline.data.files.table import TableFormat
from syncline.errors import DataError

_MAGIC = b"ARROW1"


class Arrow(TableFormat):
    """Record batches."""

    name = "arrow"

    def open(self, store: Store, path: str) -> _ArrowFile:
        """Read the footer; a stream, which has none, is read whole."""
        return _ArrowFile(store, path)


class _ArrowFile:
    def __init__(self, store: Store, path: str) -> None:
        self._shown = store.shown(path)
        self._handle = store.open(path)
        self._stream: list[pa.RecordBatch] | None = None
        self._readers: dict[tuple[int, ...], pa.ipc.RecordBatchFileReader] = {}
        try:
            is_file = self._handle.read(len(_MAGIC)) == _MAGIC
            self._handle.seek(0)
            if is_file:
                file = pa.ipc.open_file(self._handle)
                self.schema: pa.Schema = file.schema
                count = file.num_record_batches
            else:
                stream = pa.ipc.open_stream(self._handle)
                self.schema, self._stream = stream.schema, list(stream)
                count = len(self._stream)
            # The footer has no row counts, so read the last column, usually the label.
            self.group_rows = tuple(self._batch(g, self.schema.names[-1:]).num_rows for g in range(count))
        except DataError:
            self._handle.close()
            raise
        except Exception as error:
            self._handle.close()
            raise _not_arrow(self._shown, store.size(path), error) from error

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Only these columns of this record batch."""
        batch = self._batch(group, columns)
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(f"{self._shown}, record batch {group} is corrupt: {error}.") from error
        return pa.table([batch.column(name) for name in columns], names=list(columns))

    def _batch(self, group: int, columns: Sequence[str]) -> pa.RecordBatch:
        """A record batch with at least these columns; no others are read from a file."""
        if self._stream is not None:
            return self._stream[group]
        try:
            fields = tuple(sorted({self.schema.get_field_index(name) for name in columns}))
            if fields not in self._readers:
                options = pa.ipc.IpcReadOptions(included_fields=list(fields), use_threads=False)
                self._readers[fields] = pa.ipc.open_file(self._handle, options=options)
            return self._readers[fields].get_batch(group)
        except Exception as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise DataError(f"{self._shown}, record batch {group} is corrupt: {said}.") from error

    def bounds(self, column: str) -> tuple[Any, Any] | None:  # noqa: ARG002  # other formats have statistics
        return None

    def where(self, group: int) -> Where:
        """Rows are counted from 0 in their record batch."""
        return Where(f"{self._shown}, record batch {group}")

    def close(self) -> None:
        self._handle.close()


def _not_arrow(shown: str, size: int, error: Exception) -> DataError:
    if size == 0:
        return DataError(f"{shown} is empty: 0 bytes instead of an Arrow file.")
    said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return DataError(f"{shown} is not a valid Arrow file ({size} bytes): {said}.")
