"""A picture as a PNG inside the page: the few lines of the format (ISO/IEC 15948) that bytes in rows need."""

from __future__ import annotations

import base64
import struct
import zlib

from syncline.telemetry.predictions import Picture

__all__ = ["as_png", "data_url"]

_COLOUR_TYPES = {1: 0, 3: 2}  # by channels: grey, red-green-blue


def as_png(picture: Picture) -> bytes:
    """The file."""
    stride = picture.width * picture.channels
    rows = (picture.pixels[i : i + stride] for i in range(0, len(picture.pixels), stride))
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, _COLOUR_TYPES[picture.channels], 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)  # each row says how it is filtered: not at all
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def data_url(picture: Picture) -> str:
    """The file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(as_png(picture)).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
