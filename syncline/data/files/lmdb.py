"""LMDB with Caffe's Datum in each record, as CaffeOnSpark's users have it.

Here: opening a database and reading records by number, in the order of their keys. Not here: the message in a record
(`datum.py`). The package `lmdb` is an extra: pip install 'syncline[lmdb]'.
"""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from syncline.data.files.datum import Datum, read_datum
from syncline.data.files.format import Found, held_back, refuse_empty
from syncline.data.files.options import FileOptions
from syncline.data.files.pictures import decode, shape_of
from syncline.data.files.store import Store
from syncline.data.files.survey import FileFacts, Kind, Survey
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Lmdb"]

_OPEN: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""LMDB opens a file once in a process: whoever reads it shares that."""


class Lmdb:
    """A database is one group of which any record is read by itself."""

    name = "lmdb"

    def survey(self, found: Found, options: FileOptions) -> Survey:
        """Count the records, and read all labels: Caffe keeps no list of classes."""
        if found.store.is_remote:
            raise DataError(f"{found.store.location} is LMDB on a remote store; LMDB is read from a local disk only.")
        databases = [_Database(path) for path in (*found.train, *found.test)]
        facts = tuple(FileFacts(d.path, (len(d.keys),)) for d in databases)
        of_train, of_test = facts[: len(found.train)], facts[len(found.train) :]
        rows = sum(f.rows for f in of_train)
        refuse_empty(rows, found.store.location)
        kind, shape = _shape(databases[0], options)
        labels = (
            [d.datum(row).label for d in databases for row in range(len(d.keys))] if options.classes is None else []
        )
        if labels and min(labels) < 0:
            raise DataError(f"{found.store.location} has the label {min(labels)}; numbers of classes begin with 0.")
        return Survey(
            location=found.store.location,
            test_location=found.test_location,
            format=self.name,
            options=options,
            train=of_train,
            test=of_test,
            held_back=held_back(options, rows, of_test, found.store.location),
            kind=kind,
            input_shape=shape,
            classes=max(labels) + 1 if labels else options.classes or None,
            is_bytes=kind != "numbers",
            size=found.size,
        )

    def reader(self, survey: Survey, store: Store) -> _LmdbReader:  # noqa: ARG002  # databases are local
        """Reads records."""
        return _LmdbReader(survey)


class _LmdbReader:
    reads_whole_groups = False

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._databases: dict[str, _Database] = {}

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:  # noqa: ARG002
        """Inputs and labels of these records."""
        import numpy as np

        database = self._databases.setdefault(facts.path, _Database(facts.path))
        if len(database.keys) != facts.rows:
            raise DataError(
                f"{facts.path} has changed: it has {len(database.keys)} records, but had {facts.rows} when the run was "
                "planned. The order of a run holds only as long as its files stay as they are."
            )
        chosen = range(facts.rows) if rows is None else rows.tolist()
        shape = self._survey.input_shape
        inputs = np.empty((len(chosen), *shape), np.uint8 if self._survey.is_bytes else np.float32)
        targets = np.empty(len(chosen), np.int64)
        for i, row in enumerate(chosen):
            datum = database.datum(row)
            inputs[i] = self._input(datum, database.where(row))
            targets[i] = datum.label
            if self._survey.classes is not None and not 0 <= datum.label < self._survey.classes:
                raise DataError(
                    f"{database.where(row)}: the label is {datum.label}, of {self._survey.classes} classes."
                )
        return inputs, targets

    def _input(self, datum: Datum, where: str) -> np.ndarray:
        import numpy as np

        shape, survey = self._survey.input_shape, self._survey
        if survey.kind == "pictures" and datum.encoded:
            return decode(datum.data, shape, resize=survey.options.size is not None, where=where)
        values = np.frombuffer(datum.data, np.uint8) if survey.is_bytes else np.asarray(datum.floats, np.float32)
        if values.size != math.prod(shape) or datum.encoded:
            what = "a picture file" if datum.encoded else f"{values.size} {'bytes' if survey.is_bytes else 'floats'}"
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
            # Without a lock, for it may be on a disk that cannot be written to; nobody writes while we read.
            environment = _OPEN.get(self.path)
            if environment is None:
                environment = lmdb.open(self.path, subdir=False, readonly=True, lock=False, readahead=False)
                _OPEN[self.path] = environment
            return environment
        except lmdb.Error as error:
            raise DataError(f"{self.path} is not a sound LMDB database: {error}.") from error

    @cached_property
    def keys(self) -> list[bytes]:
        environment, size = self._environment, os.path.getsize(self.path)
        import lmdb  # it is there, or there would be no environment

        # LMDB maps the file: reading behind the end of one that was cut off would end the process, not raise.
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if size < needed:
            raise DataError(f"{self.path} is cut off: it has {size} bytes, but its records need {needed}.")
        try:
            with environment.begin() as transaction, transaction.cursor() as cursor:
                return [bytes(key) for key in cursor.iternext(keys=True, values=False)]
        except lmdb.Error as error:
            raise DataError(f"{self.path} is damaged: {error}.") from error

    def where(self, row: int) -> str:
        """What an error says of a record."""
        return f"{self.path}, record {row} (key {self.keys[row].decode(errors='replace')!r})"

    def datum(self, row: int) -> Datum:
        """The record of this number."""
        import lmdb

        try:
            with self._environment.begin() as transaction:
                return read_datum(bytes(transaction.get(self.keys[row])))
        except (lmdb.Error, ValueError) as error:
            raise DataError(f"{self.where(row)} is no sound Datum: {error}.") from error


def _shape(database: _Database, options: FileOptions) -> tuple[Kind, tuple[int, ...]]:
    """How the first record keeps its input, and the shape of it."""
    datum, where = database.datum(0), database.where(0)
    if datum.encoded:
        return "pictures", shape_of(datum.data, options.channels, options.side, where)
    shape = options.shape or (datum.channels, datum.height, datum.width)
    values = len(datum.data) or len(datum.floats)
    if math.prod(shape) != values or not values:
        raise DataError(
            f"{where} has {values} values, but {' x '.join(map(str, shape))} = {math.prod(shape)} are promised."
        )
    return ("pixels" if datum.data else "numbers"), shape
