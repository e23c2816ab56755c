"""Converting Arrow columns to arrays for torch.

Here: which columns are inputs and which one is the target (`choose`), and reading both. Every format with
columns uses it; an error names the row of the bad value. Not here: reading files (`parquet.py`, `arrow.py`,
`csv.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from syncline.data.files.image_codec import decode, is_image
from syncline.data.files.manifest import Kind
from syncline.data.files.options import FileOptions
from syncline.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

_LABELS = ("label", "labels", "target", "targets", "class", "y")


@dataclass(frozen=True)
class Where:
    """How an error names a row: the file and group, and how rows are counted."""

    what: str
    row: str = "row"
    first: int = 0

    def at(self, row: int) -> str:
        """The name of one row."""
        return f"{self.what}, {self.row} {row + self.first}"


@dataclass(frozen=True)
class TableColumns:
    """The columns in use, and how they store inputs."""

    features: tuple[str, ...]
    label: str | None
    kind: Kind


def choose(schema: pa.Schema, options: FileOptions, what: str, *, guessed_types: bool = False) -> TableColumns:
    """The columns to use of a table with this schema; DataError if that is ambiguous.

    With `guessed_types`, a string column may be a numeric one with a typo in it; reading it names the row.
    """
    names = list(schema.names)
    if options.label == "none":
        label = None
    elif options.label is not None:
        label = _known(options.label, names, what)
    else:
        label = next((n for n in names if n.lower() in _LABELS), names[-1] if len(names) > 1 else None)
    if options.feature_names is not None:
        features = tuple(_known(name, names, what) for name in options.feature_names)
    else:
        features = tuple(name for name in names if name != label)
    if not features:
        raise DataError(f"{what} has no input column besides {label!r}. Its columns are: {', '.join(names)}.")
    kinds = {name: _kind(schema.field(name).type) for name in features}
    if guessed_types:
        kinds = {name: kind or "numbers" for name, kind in kinds.items()}
    if len(features) == 1 and (kind := kinds[features[0]]) is not None:
        return TableColumns(features, label, kind)
    for name, kind in kinds.items():
        if kind != "numbers":
            raise DataError(
                f"{what} has the column {name!r} of type {schema.field(name).type} among its inputs, but several "
                f"input columns must all be numeric. Choose with features=[...] from {', '.join(names)}."
            )
    return TableColumns(features, label, "numbers")


def values_of(column: Any, where: Where, name: str) -> Any:
    """The column as one chunk; DataError for its first null."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{where.at(row)}: the column {name!r} is null. Fill in the value, or remove the row.")
    return column


def read_inputs(
    table: pa.Table, columns: TableColumns, shape: tuple[int, ...], where: Where, *, resize: bool
) -> np.ndarray:
    """One row per sample: float32, or uint8 for bytes."""
    import numpy as np

    if columns.kind == "numbers":
        parts = [_numbers(values_of(table[name], where, name), where, name) for name in columns.features]
        return np.stack(parts, axis=1).astype(np.float32, copy=False)
    name = columns.features[0]
    column = values_of(table[name], where, name)
    if columns.kind == "list":
        return _lists(column, shape, where, name)
    data = (column.field("bytes") if pa.types.is_struct(column.type) else column).to_pylist()
    if columns.kind == "images":
        images = [decode(d or b"", shape, resize=resize, where=where.at(i)) for i, d in enumerate(data)]
        return np.stack(images) if images else np.empty((0, *shape), np.uint8)
    return _pixels(data, shape, where, name)


def read_targets(
    column: Any, name: str, classes: int | None, class_names: Sequence[str] | None, where: Where
) -> np.ndarray:
    """Class indices as int64; regression targets as float32 of shape (n, 1)."""
    import numpy as np

    column = values_of(column, where, name)
    if class_names is not None and _is_text(column.type):
        number = {text: i for i, text in enumerate(class_names)}
        texts = column.to_pylist()
        for row, text in enumerate(texts):
            if text not in number:
                raise DataError(
                    f"{where.at(row)}: the label {text!r} is not one of the {len(number)} classes that were "
                    "found when the run was planned."
                )
        return np.fromiter((number[text] for text in texts), np.int64, len(texts))
    values = _numbers(column, where, name)
    if classes is None:
        return values.astype(np.float32).reshape(-1, 1)
    wrong = np.flatnonzero((values != np.trunc(values)) | (values < 0) | (values >= classes))
    if len(wrong):
        raise DataError(
            f"{where.at(int(wrong[0]))}: the label is {values[wrong[0]]}, but the {classes} classes are numbered from "
            f"0 to {classes - 1}. For regression, set classes=0."
        )
    return values.astype(np.int64)


def _known(name: str, names: Sequence[str], what: str) -> str:
    if name not in names:
        raise DataError(f"{what} has no column {name!r}. {did_you_mean(name, names)}", column=name, known=list(names))
    return name


def _kind(data_type: Any) -> Kind | None:
    types = pa.types
    if types.is_integer(data_type) or types.is_floating(data_type) or types.is_boolean(data_type):
        return "numbers"
    if types.is_decimal(data_type):
        return "numbers"
    if types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type):
        return "list"
    if types.is_binary(data_type) or types.is_large_binary(data_type) or types.is_fixed_size_binary(data_type):
        return "pixels"
    if types.is_struct(data_type) and data_type.get_field_index("bytes") >= 0:
        return "images"
    return None


def _is_text(data_type: Any) -> bool:
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _numbers(column: Any, where: Where, name: str) -> np.ndarray:
    import numpy as np

    if _kind(column.type) != "numbers":
        raise _no_number(column, where, name)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _no_number(column: Any, where: Where, name: str) -> DataError:
    """The error for the first value in a non-numeric column that is not a number."""
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value)
        except (TypeError, ValueError):
            return DataError(
                f"{where.at(row)}: the column {name!r} has {str(value)[:40]!r}, which is not a number. "
                "Correct it, or choose the input columns with features=[...]."
            )
    return DataError(f"{where.what}: the column {name!r} is of type {column.type}, but must be numeric.")


def _lists(column: Any, shape: tuple[int, ...], where: Where, name: str) -> np.ndarray:
    import numpy as np

    width = int(np.prod(shape))
    rows = len(column)
    lengths = np.ones(rows, np.int64)
    inner = column
    while pa.types.is_list(inner.type) or pa.types.is_large_list(inner.type) or pa.types.is_fixed_size_list(inner.type):
        counts = np.asarray(inner.value_lengths().fill_null(0)).astype(np.int64)
        ends = np.cumsum(lengths)
        sums = np.concatenate([[0], np.cumsum(counts)])
        lengths = sums[ends] - sums[ends - lengths]
        inner = inner.flatten()
    wrong = np.flatnonzero(lengths != width)
    if len(wrong):
        raise DataError(
            f"{where.at(int(wrong[0]))}: the list in column {name!r} has {lengths[wrong[0]]} numbers instead of "
            f"{width}. All rows must have the same length."
        )
    if inner.null_count:
        row = int(inner.is_null().index(True).as_py()) // max(width, 1)
        raise DataError(f"{where.at(row)}: the list in column {name!r} contains a null.")
    values = _numbers(inner, where, name)
    dtype = np.uint8 if values.dtype == np.uint8 else np.float32
    return values.astype(dtype, copy=False).reshape(rows, *shape)


def _pixels(data: Sequence[bytes], shape: tuple[int, ...], where: Where, name: str) -> np.ndarray:
    import numpy as np

    width = int(np.prod(shape))
    for row, value in enumerate(data):
        if len(value) != width:
            hint = " It is an image file, but the first row is not." if is_image(value) else ""
            raise DataError(f"{where.at(row)}: the column {name!r} has {len(value)} bytes instead of {width}.{hint}")
    return np.frombuffer(bytearray(b"".join(data)), np.uint8).reshape(-1, *shape)
