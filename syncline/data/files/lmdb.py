"""LMDB with Caffe's Datum in each record, as in CaffeOnSpark.

Here: opening a database and reading records by index, in key order. Not here: the message in a record
(`datum.py`). The package `lmdb` is an extra: pip install 'syncline[lmdb]'.
"""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from syncline.data.files.datum import Datum, read_datum
from syncline.data.files.format import Found, refuse_empty
from syncline.data.files.image_codec import decode, shape_of
from syncline.data.files.manifest import FileFacts, Kind, Manifest
from syncline.data.files.options import FileOptions
from syncline.data.files.store import Store
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_OPEN: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""LMDB can open a file only once per process, so all readers share the environment."""


class Lmdb:
    """A database is one group; each record is read separately."""

    name = "lmdb"

    def scan(self, found: Found, options: FileOptions) -> Manifest:
        """Count the records, and read all labels: Caffe keeps no list of classes."""
        if found.store.is_remote:
            raise DataError(
                f"{found.store.location} is on a remote store, but LMDB needs a local disk. Copy it, or "
                "convert it to Parquet."
            )
        databases = [_Database(path) for path in (*found.train, *found.test)]
        facts = tuple(FileFacts(d.path, (len(d.keys),)) for d in databases)
        of_train, of_test = facts[: len(found.train)], facts[len(found.train) :]
        refuse_empty(sum(f.rows for f in of_train), found.store.location)
        kind, shape = _shape(databases[0], options)
        labels = (
            [d.datum(row).label for d in databases for row in range(len(d.keys))] if options.classes is None else []
        )
        if labels and min(labels) < 0:
            raise DataError(f"{found.store.location} has the label {min(labels)}, but class indices start at 0.")
        return found.manifest(
            options,
            of_train,
            of_test,
            format=self.name,
            kind=kind,
            input_shape=shape,
            classes=max(labels) + 1 if labels else options.classes or None,
            is_bytes=kind != "numbers",
        )

    def reader(self, manifest: Manifest, store: Store) -> _LmdbReader:  # noqa: ARG002  # databases are local
        return _LmdbReader(manifest)


class _LmdbReader:
    reads_whole_groups = False

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._databases: dict[str, _Database] = {}

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:  # noqa: ARG002
        """Inputs and labels of these records."""
        import numpy as np

        database = self._databases.setdefault(facts.path, _Database(facts.path))
        if len(database.keys) != facts.rows:
            raise DataError(
                f"{facts.path} has changed: it has {len(database.keys)} records, but had {facts.rows} when the run was "
                "planned. Do not change the files during a run, or start a new run."
            )
        chosen = range(facts.rows) if rows is None else rows.tolist()
        shape = self._manifest.input_shape
        inputs = np.empty((len(chosen), *shape), np.uint8 if self._manifest.is_bytes else np.float32)
        targets = np.empty(len(chosen), np.int64)
        for i, row in enumerate(chosen):
            datum = database.datum(row)
            inputs[i] = self._input(datum, database.where(row))
            targets[i] = datum.label
            if self._manifest.classes is not None and not 0 <= datum.label < self._manifest.classes:
                raise DataError(
                    f"{database.where(row)}: the label is {datum.label}, of {self._manifest.classes} classes."
                )
        return inputs, targets

    def _input(self, datum: Datum, where: str) -> np.ndarray:
        import numpy as np

        shape, manifest = self._manifest.input_shape, self._manifest
        if manifest.kind == "images" and datum.encoded:
            return decode(datum.data, shape, resize=manifest.options.size is not None, where=where)
        values = np.frombuffer(datum.data, np.uint8) if manifest.is_bytes else np.asarray(datum.floats, np.float32)
        if values.size != math.prod(shape) or datum.encoded:
            what = "an image file" if datum.encoded else f"{values.size} {'bytes' if manifest.is_bytes else 'floats'}"
            raise DataError(f"{where} has {what}, but {math.prod(shape)} values are needed, as in the first record.")
        return values.reshape(shape)


class _Database:
    """One LMDB, open for reading."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def _environment(self) -> Any:
        try:
            import lmdb
        except ImportError as error:
            raise DataError(f"{self.path} is LMDB. Reading it needs a package: pip install 'syncline[lmdb]'") from error
        if os.path.getsize(self.path) == 0:
            raise DataError(f"{self.path} is empty: 0 bytes instead of an LMDB database.")
        try:
            # Without a lock file: the disk may be read-only, and no process writes while we read.
            environment = _OPEN.get(self.path)
            if environment is None:
                environment = lmdb.open(self.path, subdir=False, readonly=True, lock=False, readahead=False)
                _OPEN[self.path] = environment
            return environment
        except lmdb.Error as error:
            raise DataError(f"{self.path} is not a valid LMDB database: {error}.") from error

    @cached_property
    def keys(self) -> list[bytes]:
        environment, size = self._environment, os.path.getsize(self.path)
        import lmdb  # installed, or _environment would have raised

        # LMDB maps the file: reading past the end of a truncated one would kill the process, not raise.
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if size < needed:
            raise DataError(f"{self.path} is truncated: it has {size} bytes, but its records need {needed}.")
        try:
            with environment.begin() as transaction, transaction.cursor() as cursor:
                return [bytes(key) for key in cursor.iternext(keys=True, values=False)]
        except lmdb.Error as error:
            raise DataError(f"{self.path} is corrupt: {error}.") from error

    def where(self, row: int) -> str:
        """How an error names a record."""
        return f"{self.path}, record {row} (key {self.keys[row].decode(errors='replace')!r})"

    def datum(self, row: int) -> Datum:
        """The record with this index."""
        import lmdb

        try:
            with self._environment.begin() as transaction:
                return read_datum(bytes(transaction.get(self.keys[row])))
        except (lmdb.Error, ValueError) as error:
            raise DataError(f"{self.where(row)} is not a valid Datum: {error}.") from error


def _shape(database: _Database, options: FileOptions) -> tuple[Kind, tuple[int, ...]]:
    """How the first record stores its input, and its shape."""
    datum, where = database.datum(0), database.where(0)
    if datum.encoded:
        return "images", shape_of(datum.data, options.channels, options.side, where)
    shape = options.shape or (datum.channels, datum.height, datum.width)
    values = len(datum.data) or len(datum.floats)
    if math.prod(shape) != values or not values:
        raise DataError(
            f"{where} has {values} values, but {' x '.join(map(str, shape))} = {math.prod(shape)} were expected."
        )
    return ("pixels" if datum.data else "numbers"), shape
