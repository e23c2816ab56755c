"""Caffe's Datum: one sample as a protobuf message, as CaffeOnSpark's users keep them in LMDB.

Here: reading and writing the few fields of the message, without protobuf. Not here: the LMDB around it (`lmdb.py`).

    message Datum { int32 channels = 1; int32 height = 2; int32 width = 3; bytes data = 4; int32 label = 5;
                    repeated float float_data = 6; bool encoded = 7; }
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIELDS = {1: "channels", 2: "height", 3: "width", 5: "label", 7: "encoded"}


@dataclass(frozen=True, kw_only=True)
class Datum:
    """One sample. It has `data`, the bytes of its pixels or of an image file, or `floats`."""

    channels: int = 0
    height: int = 0
    width: int = 0
    data: bytes = b""
    label: int = 0
    floats: tuple[float, ...] = ()
    encoded: bool = False


def read_datum(message: bytes) -> Datum:
    """From the bytes of the message; ValueError if they are none."""
    numbers: dict[str, int] = {}
    data, floats = b"", bytearray()
    for field, kind, value in _fields(message):
        if field in _FIELDS and kind == _VARINT and isinstance(value, int):
            numbers[_FIELDS[field]] = value
        elif field == 4 and kind == _BYTES and isinstance(value, bytes):
            data = value
        elif field == 6 and kind in (_BYTES, _FIXED32) and isinstance(value, bytes):
            floats += value  # packed, or one at a time
    if len(floats) % 4:
        raise ValueError("its float_data is truncated")
    label = numbers.pop("label", 0)
    return Datum(
        label=label - (1 << 64) if label >> 63 else label,
        encoded=bool(numbers.pop("encoded", 0)),
        data=data,
        floats=struct.unpack(f"<{len(floats) // 4}f", floats),
        **numbers,
    )


def write_datum(datum: Datum) -> bytes:
    """The bytes of the message."""
    message = bytearray()
    for field, name in ((1, "channels"), (2, "height"), (3, "width")):
        message += _varint(field << 3) + _varint(getattr(datum, name))
    if datum.data:
        message += _varint(4 << 3 | _BYTES) + _varint(len(datum.data)) + datum.data
    message += _varint(5 << 3) + _varint(datum.label & (1 << 64) - 1)
    for value in datum.floats:  # one at a time, as Caffe's own (proto2) does
        message += _varint(6 << 3 | _FIXED32) + struct.pack("<f", value)
    if datum.encoded:
        message += _varint(7 << 3) + _varint(1)
    return bytes(message)


def _fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of each field."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            number, at = _read_varint(message, at)
            yield tag >> 3, kind, number
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"byte {at} does not start a field")
        if at + length > len(message):
            raise ValueError(f"it ends after {len(message)} bytes, but a field extends to byte {at + length}")
        yield tag >> 3, kind, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError(f"it ends after {len(message)} bytes, within a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"byte {at} is within a number that does not end")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
