"""Converting DataFrame columns, as Arrow arrays, to arrays for torch.

Here: which columns can be read (`kind_of`), and reading features and labels: pure functions from Arrow to NumPy. A
`DataError` names the column, because it occurs in an executor, far from the user. Not here: where batches come from
(`feeding.py`, `model.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from syncline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

__all__ = ["Kind", "as_vectors", "kind_of", "read_features", "read_labels"]

Kind = Literal["vector", "array", "image", "bytes", "number"]

_READABLE = "numbers, arrays of numbers, pyspark.ml vectors, images of Spark's image source, and bytes"
_CHANNELS = {0: 1, 16: 3, 24: 4}  # OpenCV types, as in Spark's image source
_ENCODED = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF"}


def kind_of(name: str, data_type: DataType) -> Kind:
    """How the column `name` of this Spark type is read; `ConfigError` if it cannot be."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types

    if isinstance(data_type, VectorUDT):
        return "vector"
    if isinstance(data_type, types.NumericType | types.BooleanType):
        return "number"
    if isinstance(data_type, types.BinaryType):
        return "bytes"
    if isinstance(data_type, types.StructType) and {"height", "width", "mode", "data"} <= set(data_type.names):
        return "image"
    inner = data_type
    while isinstance(inner, types.ArrayType):
        inner = inner.elementType
    if inner is not data_type and isinstance(inner, types.NumericType):
        return "array"
    hint = " Index its values with StringIndexer first." if isinstance(data_type, types.StringType) else ""
    raise ConfigError(f"The column {name!r} is of type {data_type.simpleString()}. Supported are {_READABLE}.{hint}")


def read_features(name: str, column: pa.Array, kind: Kind, dtype: str = "float32") -> np.ndarray:
    """One row per sample; numbers become `dtype`. Images and bytes stay uint8, to be divided by 255 later."""
    _refuse_nulls(name, column)
    if kind == "image":
        return _images(name, column)
    if kind == "bytes":
        return _bytes(name, column)
    if kind == "vector":
        return _vectors(name, column).astype(dtype, copy=False)
    if kind == "number":
        return _numbers(name, column).astype(dtype, copy=False).reshape(-1, 1)
    return _nested(name, column).astype(dtype, copy=False)


def read_labels(name: str, column: pa.Array, kind: Kind, *, are_classes: bool) -> np.ndarray:
    """The targets: class indices as int64, anything else as float32.

    Spark ML has class indices as doubles; these must be integral.
    """
    _refuse_nulls(name, column)
    if kind in ("image", "bytes"):
        raise ConfigError(f"The label column {name!r} holds {kind}; it must hold numbers, arrays or vectors.")
    values = {"vector": _vectors, "array": _nested, "number": _numbers}[kind](name, column)
    if not are_classes:
        return values.astype(np.float32, copy=False)
    if values.dtype.kind == "f":
        wrong = values[values != np.trunc(values)]
        if wrong.size:
            raise DataError(
                f"The label column {name!r} holds {float(wrong.flat[0]):g}, but the loss needs class indices: "
                "0, 1, 2 and so on. For regression, use a loss such as 'mse_loss'."
            )
    if values.size and values.min() < 0:
        raise DataError(f"The label column {name!r} holds {int(values.min())}, but class indices start at 0.")
    return values.astype(np.int64, copy=False)


def as_vectors(rows: np.ndarray) -> pa.Array:
    """Rows of numbers as dense vectors of Spark ML."""
    count, width = rows.shape
    offsets = pa.array(np.arange(0, count * width + 1, width, dtype=np.int32)) if width else None
    values = pa.ListArray.from_arrays(offsets, pa.array(rows.astype(np.float64, copy=False).reshape(-1)))
    return pa.StructArray.from_arrays(
        [pa.array(np.ones(count, np.int8)), pa.nulls(count, pa.int32()), pa.nulls(count, pa.list_(pa.int32())), values],
        names=["type", "size", "indices", "values"],
    )


def _refuse_nulls(name: str, column: pa.Array) -> None:
    if column.null_count:
        raise DataError(
            f"The column {name!r} has null values. Remove these rows with df.dropna(subset=[{name!r}]), "
            "or fill them in."
        )


def _numbers(name: str, column: pa.Array) -> np.ndarray:
    _refuse_nulls(name, column)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _nested(name: str, column: pa.Array) -> np.ndarray:
    """Lists of the same length, of lists or numbers."""
    shape = [len(column)]
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        _refuse_nulls(name, column)
        shape.append(_common_length(name, np.diff(column.offsets.to_numpy())))
        column = column.flatten()
    return _numbers(name, column).reshape(shape)


def _vectors(name: str, column: pa.StructArray) -> np.ndarray:
    is_dense = np.asarray(column.field("type")) == 1
    values = column.field("values")
    if is_dense.all():
        return _nested(name, values)
    sizes = np.asarray(column.field("size").fill_null(0))
    sizes = np.where(is_dense, np.diff(values.offsets.to_numpy()), sizes)
    width = _common_length(name, sizes)
    rows = np.zeros((len(column), width))
    indices = column.field("indices")
    for k, dense in enumerate(is_dense):
        rows[k, slice(None) if dense else np.asarray(indices[k].values)] = np.asarray(values[k].values)
    return rows


def _images(name: str, column: pa.StructArray) -> np.ndarray:
    """Channels first in RGB order, as for torch; Spark stores rows of pixels in BGR order."""
    parts = {part: np.asarray(column.field(part)) for part in ("height", "width", "mode")}
    shapes = set(zip(*(part.tolist() for part in parts.values()), strict=True))
    if len(shapes) > 1:
        some = ", ".join(f"{w} x {h}" for h, w, _ in sorted(shapes)[:3])
        raise DataError(f"The images in {name!r} differ in size or kind ({some}, ...). Resize them first.")
    ((height, width, mode),) = shapes or {(0, 0, 0)}
    if mode not in _CHANNELS:
        raise DataError(f"The images in {name!r} are of OpenCV's type {mode}, which is not one of 8 bits per channel.")
    flat = _bytes(name, column.field("data"), may_be_encoded=True)
    images = flat.reshape(len(column), height, width, _CHANNELS[mode]).transpose(0, 3, 1, 2)
    if mode != 0:
        images = images[:, [2, 1, 0, *range(3, _CHANNELS[mode])]]
    return np.ascontiguousarray(images)


def _bytes(name: str, column: pa.Array, *, may_be_encoded: bool = False) -> np.ndarray:
    _refuse_nulls(name, column)
    length = 0
    if len(column):
        first = column[0].as_py()
        encoded = next((kind for magic, kind in _ENCODED.items() if first.startswith(magic)), None)
        if encoded and not may_be_encoded:
            raise DataError(
                f"The column {name!r} holds {encoded} files, but bytes are read as pixels. Decode them first, for "
                "example with spark.read.format('image')."
            )
    column = column.cast(pa.large_binary())
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    length = _common_length(name, np.diff(offsets))
    start = int(offsets[0]) if len(offsets) else 0
    values = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return values[start : start + len(column) * length].reshape(len(column), length)


def _common_length(name: str, lengths: Any) -> int:
    if not len(lengths):
        return 0
    least, most = int(lengths.min()), int(lengths.max())
    if least != most:
        raise DataError(
            f"The rows of the column {name!r} have between {least} and {most} values. All must have the same number."
        )
    return least
