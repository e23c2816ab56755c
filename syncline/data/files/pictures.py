"""From the bytes of an encoded picture to an array of pixels.

Here: decoding with PIL, to one number of channels and one size. Not here: where the bytes come from.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["decode", "encode", "is_picture", "shape_of"]

_MAGICS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"P5", b"P6")


def is_picture(data: bytes) -> bool:
    """Whether these bytes begin as a picture file does."""
    return data.startswith(_MAGICS)


def shape_of(data: bytes, channels: int | None, side: tuple[int, int] | None, where: str) -> tuple[int, int, int]:
    """(channels, height, width) that `decode` would give, from the header alone."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            found = channels or (1 if picture.mode in ("1", "L", "I;16", "I", "F") else 3)
            height, width = side or (picture.height, picture.width)
    except Exception as error:  # PIL's decoders raise many kinds
        raise _unreadable(data, where, error) from error
    return found, height, width


def decode(data: bytes, shape: tuple[int, ...], *, resize: bool, where: str) -> np.ndarray:
    """Uint8 of `shape` (channels, height, width); `where` says in an error which picture it is."""
    import numpy as np
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(data)) as picture:
            image = picture.convert("L" if channels == 1 else "RGB")
    except Exception as error:
        raise _unreadable(data, where, error) from error
    if resize:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    elif (image.width, image.height) != (width, height):
        raise DataError(
            f"{where} has {image.width}x{image.height} pixels, but the first picture has {width}x{height}. Give a size "
            f"to which all are brought, such as size={min(width, height)}."
        )
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def encode(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 pixels (channels, height, width)."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))).save(
        file, "PNG"
    )
    return file.getvalue()


def _unreadable(data: bytes, where: str, error: Exception) -> DataError:
    if not data:
        return DataError(f"{where} is empty: 0 bytes instead of a picture. Replace it, or leave it out.")
    return DataError(f"{where} cannot be read as a picture: {error}. Replace it, or leave it out.")
