"""Decoding and encoding images.

Here: between the bytes of an image file and an array of pixels, with PIL. Not here: where the bytes come from.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_MAGICS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"P5", b"P6")


def is_image(data: bytes) -> bool:
    """Whether these bytes start like an image file."""
    return data.startswith(_MAGICS)


def shape_of(data: bytes, channels: int | None, side: tuple[int, int] | None, where: str) -> tuple[int, int, int]:
    """(channels, height, width) that `decode` would give, from the header alone."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            found = channels or (1 if image.mode in ("1", "L", "I;16", "I", "F") else 3)
            height, width = side or (image.height, image.width)
    except Exception as error:  # PIL's decoders raise many kinds
        raise _unreadable(data, where, error) from error
    return found, height, width


def decode(data: bytes, shape: tuple[int, ...], *, resize: bool, where: str) -> np.ndarray:
    """Uint8 of `shape` (channels, height, width); `where` names the image in an error."""
    import numpy as np
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(data)) as file:
            image = file.convert("L" if channels == 1 else "RGB")
    except Exception as error:
        raise _unreadable(data, where, error) from error
    if resize:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    elif (image.width, image.height) != (width, height):
        raise DataError(
            f"{where} has {image.width}x{image.height} pixels, but the first image has {width}x{height}. Set a size "
            f"to resize all images, such as size={min(width, height)}."
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
        return DataError(f"{where} is empty: 0 bytes instead of an image. Replace it, or leave it out.")
    return DataError(f"{where} cannot be read as an image: {error}. Replace it, or leave it out.")
