"""Tensor data of the protocol: its datatypes, and their form in JSON and in bytes.

Here: pure functions between NumPy arrays and what travels. Not here: the messages around them (`messages.py`), and
which tensors a model takes (`signature.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from syncline.serving.server.refusal import RequestRefused

__all__ = ["DTYPES", "datatype_of", "from_bytes", "from_json", "to_bytes", "to_json"]

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""The protocol's datatypes. BF16 is missing: NumPy has no such type."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FORMATS = {"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
            "INT64": "q", "FP32": "f", "FP64": "d"}  # fmt: skip
_MOST_DIMENSIONS = 32


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The protocol's name of a NumPy type.

    >>> datatype_of(np.dtype("float32"))
    'FP32'
    """
    return _NAMES[dtype]


def from_json(
    data: list[Any], datatype: str, shape: Sequence[int], name: str, *, may_have_booleans: bool = True
) -> np.ndarray:
    """The array in a request's JSON: flat, or nested as the shape says.

    Looking for booleans among numbers takes longer than reading them: `may_have_booleans` says whether to.
    """
    values = data if _is_flat(data) else _flattened(data, list(shape), name)
    if len(values) != prod(shape):
        raise RequestRefused(
            f"Input {name!r} has {len(values)} values, but the shape {list(shape)} holds {prod(shape)}.",
            code="wrong-size", input=name, values=len(values), shape=list(shape),
        )  # fmt: skip
    try:
        if may_have_booleans and datatype in _FORMATS and bool in set(map(type, values)):
            raise TypeError("true and false are BOOL")
        return _PACKERS[datatype](values, datatype).reshape(shape)
    except (struct.error, OverflowError, TypeError, ValueError) as error:
        raise RequestRefused(
            f"Input {name!r} has a value that is not {datatype}: {error}.",
            code="wrong-value", input=name, datatype=datatype,
        ) from error  # fmt: skip


def from_bytes(data: bytes | memoryview, datatype: str, shape: Sequence[int], name: str) -> np.ndarray:
    """The array in the bytes after a request's JSON; it shares their memory, except for BYTES."""
    count = prod(shape)
    if datatype == "BYTES":
        return _split_bytes(bytes(data), count, name).reshape(shape)
    dtype = DTYPES[datatype]
    if len(data) != count * dtype.itemsize:
        raise RequestRefused(
            f"Input {name!r} has {len(data)} bytes, but {list(shape)} of {datatype} are {count * dtype.itemsize}.",
            code="wrong-size", input=name, size_bytes=len(data), shape=list(shape), datatype=datatype,
        )  # fmt: skip
    found = np.frombuffer(data, dtype)
    if datatype == "BOOL" and bool((found.view(np.uint8) > 1).any()):
        raise RequestRefused(f"Input {name!r}: a byte of BOOL is 0 or 1.", code="wrong-value", input=name)
    return found.reshape(shape)


def to_json(array: np.ndarray) -> list[Any]:
    """The values as a response's JSON has them: flat, strings for bytes."""
    values: list[Any] = array.ravel().tolist()
    if array.dtype == object:
        return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]
    return values


def to_bytes(array: np.ndarray) -> bytes:
    """The bytes of a tensor; each element of BYTES begins with its length in 4 bytes."""
    if array.dtype != object:
        return array.tobytes()
    values = [value if isinstance(value, bytes) else str(value).encode() for value in array.ravel().tolist()]
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _is_flat(data: list[Any]) -> bool:
    return not data or not isinstance(data[0], list)


def _flattened(data: list[Any], shape: list[int], name: str) -> list[Any]:
    """The values of nested rows, which must have exactly this shape."""
    level: list[Any] = data
    for depth, size in enumerate(shape[:_MOST_DIMENSIONS]):
        if depth:
            if not all(isinstance(row, list) for row in level):
                raise _not_of_shape(name, shape)
            if any(len(row) != size for row in level):
                raise _not_of_shape(name, shape)
            level = list(chain.from_iterable(level))
        elif len(level) != size:
            raise _not_of_shape(name, shape)
    if any(isinstance(value, list) for value in level):
        raise _not_of_shape(name, shape)
    return level


def _not_of_shape(name: str, shape: list[int]) -> RequestRefused:
    return RequestRefused(
        f"The rows of input {name!r} do not have the shape {shape}.", code="wrong-size", input=name, shape=shape
    )


def _numbers(values: list[Any], datatype: str) -> np.ndarray:
    # Three times as fast as np.asarray for a list of floats, and it refuses strings, and fractions for integers.
    packed = struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    return np.frombuffer(packed, DTYPES[datatype])


def _booleans(values: list[Any], datatype: str) -> np.ndarray:
    if not set(map(type, values)) <= {bool}:
        raise TypeError(f"{datatype} is true or false")
    return np.array(values, np.bool_)


def _strings(values: list[Any], datatype: str) -> np.ndarray:
    if not set(map(type, values)) <= {str}:
        raise TypeError(f"{datatype} is a string in JSON")
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _half(values: list[Any], datatype: str) -> np.ndarray:
    del values
    raise TypeError(f"the protocol has no JSON form of {datatype}; send it as binary data")


_PACKERS: dict[str, Callable[[list[Any], str], np.ndarray]] = {
    **dict.fromkeys(_FORMATS, _numbers), "BOOL": _booleans, "BYTES": _strings, "FP16": _half
}  # fmt: skip


def _split_bytes(data: bytes, count: int, name: str) -> np.ndarray:
    found, place = np.empty(count, object), 0
    for index in range(count):
        end = place + 4
        length = int.from_bytes(data[place:end], "little")
        place = end + length
        if place > len(data) or end > len(data):
            raise _bad_bytes(name, count)
        found[index] = data[end:place].decode(errors="surrogateescape")
    if place != len(data):
        raise _bad_bytes(name, count)
    return found


def _bad_bytes(name: str, count: int) -> RequestRefused:
    return RequestRefused(
        f"Input {name!r} does not hold {count} byte strings, each after its length in 4 bytes.",
        code="wrong-size", input=name, values=count,
    )  # fmt: skip
