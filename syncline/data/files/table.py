"""Formats that are tables: what parquet, Arrow and CSV have in common.

Here: `TableFormat`, which makes a `Manifest` from the metadata of files, and the reader of their row groups. Not here:
opening a file and reading one group (`parquet.py`, `arrow.py`, `csv.py`), and decoding a column (`columns.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from syncline.data.files.columns import TableColumns, Where, choose, read_inputs, read_targets, values_of
from syncline.data.files.format import Found, refuse_empty
from syncline.data.files.image_codec import is_image, shape_of
from syncline.data.files.manifest import FileFacts, Kind, Manifest
from syncline.data.files.options import FileOptions
from syncline.data.files.store import Store
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

SHAPE, CLASS_NAMES = b"syncline.shape", b"syncline.classes"
"""What `syncline data convert` notes in the schema: the shape of one input, and what the classes are called."""

_THREADS = 8
"""How many files to open at once for their metadata; remote stores are slow."""

_MOST_OPEN = 64
_MOST_CLASSES = 100_000
"""Whole numbers beyond this are hardly numbers of classes."""


class TableFile(Protocol):
    """One file that is open."""

    schema: pa.Schema
    group_rows: tuple[int, ...]

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of a group."""

    def bounds(self, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest value of a column, if the file says so without being read."""

    def where(self, group: int) -> Where:
        """What an error says of a place in a group."""

    def close(self) -> None: ...


class TableFormat:
    """A format whose files are tables."""

    name: str
    guesses_types = False
    """Whether the types of columns are guessed from their values, so that these must be looked at first of all."""

    def open(self, store: Store, path: str) -> TableFile:
        """One file; DataError if it is none of this format."""
        raise NotImplementedError

    def scan(self, found: Found, options: FileOptions) -> Manifest:
        """From the metadata of every file, the first rows of one, and labels only as far as needed."""
        with contextlib.ExitStack() as stack:
            train = self._open_all(found.store, found.train, stack)
            test = self._open_all(found.test_store, found.test, stack)
            files = [*zip(found.train, train, strict=True), *zip(found.test, test, strict=True)]
            refuse_empty(sum(sum(file.group_rows) for file in train), found.store.location)
            first_path, first = files[0]
            columns = choose(first.schema, options, found.store.shown(first_path), guessed_types=self.guesses_types)
            if self.guesses_types:
                for _, file in files:
                    read_inputs(file.read(0, columns.features), columns, (), file.where(0), resize=False)
            for path, file in files[1:]:
                _check_alike(file.schema, first.schema, columns, path, first_path)
            facts = [FileFacts(path, file.group_rows) for path, file in files]
            of_train, of_test = tuple(facts[: len(train)]), tuple(facts[len(train) :])
            kind, shape, is_bytes = _inputs(train, columns, options)
            classes, class_names = _classes([*train, *test], columns.label, options)
        return found.manifest(
            options,
            of_train,
            of_test,
            format=self.name,
            kind=kind,
            features=columns.features,
            label=columns.label,
            input_shape=shape,
            classes=classes,
            class_names=class_names,
            is_bytes=is_bytes,
        )

    def reader(self, manifest: Manifest, store: Store) -> _TableReader:
        """Reads groups of rows from the files of one store."""
        return _TableReader(self, manifest, store)

    def _open_all(self, store: Store, paths: Sequence[str], stack: contextlib.ExitStack) -> list[TableFile]:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="data-manifest") as pool:
            files = list(pool.map(lambda path: self.open(store, path), paths))
        for file in files:
            stack.callback(file.close)
        return files


class _TableReader:
    reads_whole_groups = True

    def __init__(self, table_format: TableFormat, manifest: Manifest, store: Store) -> None:
        self._format, self._manifest, self._store = table_format, manifest, store
        self._columns = TableColumns(manifest.features, manifest.label, manifest.kind)
        self._open: OrderedDict[str, TableFile] = OrderedDict()

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:
        file = self._file(facts)
        manifest, where = self._manifest, file.where(group)
        label = [manifest.label] if manifest.label is not None else []
        table = file.read(group, [*manifest.features, *label])
        resize = manifest.options.size is not None
        parts = [read_inputs(table, self._columns, manifest.input_shape, where, resize=resize)]
        parts[0] = parts[0].reshape(-1, *manifest.input_shape)
        for name in label:
            parts.append(read_targets(table[name], name, manifest.classes, manifest.class_names, where))
        return tuple(parts if rows is None else (part[rows] for part in parts))

    def _file(self, facts: FileFacts) -> TableFile:
        if facts.path not in self._open:
            file = self._format.open(self._store, facts.path)
            if file.group_rows != facts.group_rows:
                file.close()
                raise DataError(
                    f"{self._store.shown(facts.path)} has changed: it has {sum(file.group_rows)} rows in "
                    f"{len(file.group_rows)} groups, but had {facts.rows} in {len(facts.group_rows)} when the run was "
                    "planned. Do not change the files during a run, or start a new run."
                )
            self._open[facts.path] = file
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(facts.path)
        return self._open[facts.path]


def _check_alike(schema: pa.Schema, first: pa.Schema, columns: TableColumns, path: str, first_path: str) -> None:
    for name in (*columns.features, *([columns.label] if columns.label else [])):
        if name not in schema.names:
            raise DataError(
                f"{path} has no column {name!r}, but {first_path} has. All files must have the same columns."
            )
        if schema.field(name).type != first.field(name).type:
            raise DataError(
                f"{path}: the column {name!r} is of type {schema.field(name).type}, but in {first_path} it is of type "
                f"{first.field(name).type}. All files must have the same types."
            )


def _inputs(
    files: Iterable[TableFile], columns: TableColumns, options: FileOptions
) -> tuple[Kind, tuple[int, ...], bool]:
    """How inputs are stored, the shape of one, and whether they are bytes."""
    if columns.kind == "numbers":
        return "numbers", _shaped((len(columns.features),), options), False
    name = columns.features[0]
    file = next(f for f in files if sum(f.group_rows))
    group = next(g for g, rows in enumerate(file.group_rows) if rows)
    where = file.where(group)
    value = values_of(file.read(group, [name])[name].slice(0, 1), where, name)[0]
    if columns.kind == "list":
        shape, inner = _list_shape(value.as_py()), value.type
        while not pa.types.is_integer(inner) and hasattr(inner, "value_type"):
            inner = inner.value_type
        noted = (file.schema.metadata or {}).get(SHAPE)
        return "list", _shaped(shape, options, tuple(json.loads(noted)) if noted else None), inner == pa.uint8()
    data = value.as_py()["bytes"] if columns.kind == "images" else value.as_py()
    if columns.kind == "images" or is_image(data):
        return "images", shape_of(data or b"", options.channels, options.side, where.at(0)), True
    return "pixels", _shaped((len(data),), options), True


def _list_shape(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _shaped(shape: tuple[int, ...], options: FileOptions, written: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The shape set by the user, else that noted in the file, else that of the row."""
    if options.shape is None:
        return shape if written is None else written
    if math.prod(options.shape) != math.prod(shape):
        raise DataError(
            f"shape is {options.shape}, which holds {math.prod(options.shape)} values, but a row has "
            f"{math.prod(shape)}."
        )
    return options.shape


def _classes(
    files: Sequence[TableFile], label: str | None, options: FileOptions
) -> tuple[int | None, tuple[str, ...] | None]:
    """The number of classes, and their names if the labels are strings."""
    if label is None or options.classes == 0:
        return None, None
    data_type = files[0].schema.field(label).type
    is_dictionary = pa.types.is_dictionary(data_type)
    if is_dictionary or pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        names: set[str] = set()
        for column, where in _read_all(files, label):
            names |= set(pc.unique(values_of(column, where, label)).to_pylist())
        return max(len(names), options.classes or 0), tuple(sorted(names))
    noted = _noted_names(files[0].schema, label)
    if noted and options.classes is None:
        return len(noted), noted
    if options.classes is not None:
        return options.classes, None
    if not (pa.types.is_integer(data_type) or pa.types.is_boolean(data_type)):
        return None, None
    bounds = [file.bounds(label) for file in files if sum(file.group_rows)]
    if any(b is None for b in bounds):
        found = [(pc.min_max(column).as_py(), where) for column, where in _read_all(files, label)]
        bounds = [(b["min"], b["max"]) for b, _ in found if b["min"] is not None]
    least, most = min(int(b[0]) for b in bounds if b), max(int(b[1]) for b in bounds if b)
    if least < 0 or most >= _MOST_CLASSES:
        raise DataError(
            f"The labels in column {label!r} go from {least} to {most}, but class indices must start at 0 and stay "
            f"below {_MOST_CLASSES:,}. For regression, set classes=0."
        )
    return most + 1, None


def _noted_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """Class names from the file's metadata, as Syncline or Hugging Face datasets write them."""
    notes = schema.metadata or {}
    try:
        if CLASS_NAMES in notes:
            return tuple(json.loads(notes[CLASS_NAMES]))
        features = json.loads(notes[b"huggingface"])["info"]["features"]
        return tuple(features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def _read_all(files: Sequence[TableFile], column: str) -> Iterable[tuple[Any, Where]]:
    for file in files:
        for group in range(len(file.group_rows)):
            yield file.read(group, [column])[column], file.where(group)
