"""Preparing image files as model inputs, like the model's training data.

Here: reading any image that Pillow can read, and converting it to the format of the training data. Not here: the model
and its predictions (`prediction.py`).

Handwriting as in MNIST is light on dark, with the ink scaled into the inner 20 of 28 pixels and its center of mass in
the middle (LeCun et al., 1998). So an image with a light border is taken for dark ink on paper and inverted, and
unless it has the right size already, its ink is scaled and centered in the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from syncline.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_INK = 0.2
"""The fraction of the darkest ink above which a pixel counts as ink."""
_INNER = 20 / 28
"""The fraction of a side that the ink of MNIST's digits fills."""


def find_images(paths: list[Path]) -> list[Path]:
    """The files, with each folder replaced by its images in order of name."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in _SUFFIXES)
            if not inside:
                raise DataError(f"The folder {path} contains no images ({', '.join(_SUFFIXES)}).")
            found += inside
        elif not path.exists():
            raise DataError(f"There is no image {path}. Pass the path of a file or of a folder with images.")
        else:
            found.append(path)
    return found


def read_image(path: Path | BinaryIO, shape: tuple[int, int, int], *, is_handwriting: bool) -> np.ndarray:
    """The image as float32 of `shape` (channels, height, width), from 0 to 1."""
    channels, height, width = shape
    image = _open(path, "L" if channels == 1 else "RGB")
    if is_handwriting:
        return _handwriting(image, height, width)[None]
    if image.size != (width, height):
        image = image.resize((width, height), _bilinear())
    pixels = np.asarray(image, dtype=np.float32) / 255
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _open(path: Path | BinaryIO, mode: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            has_alpha = "A" in image.getbands() or "transparency" in image.info
            if has_alpha:  # transparent pixels are paper
                paper = Image.new("RGBA", image.size, "white")
                return Image.alpha_composite(paper, image.convert("RGBA")).convert(mode)
            return image.convert(mode)
    except UnidentifiedImageError:
        raise DataError(f"{path} is not an image in a format that Pillow can read. Save it as PNG or JPEG.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}. Save it again as PNG or JPEG.") from error


def _bilinear() -> int:
    from PIL.Image import Resampling

    return Resampling.BILINEAR


def _handwriting(image: Image, height: int, width: int) -> np.ndarray:
    pixels = np.asarray(image, dtype=np.float32) / 255
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    if np.median(border) > 0.5:
        pixels = 1 - pixels
    if pixels.shape == (height, width):
        return pixels
    return _centered(pixels, height, width)


def _centered(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The ink, scaled to the inner part of an image of this size and centered by mass."""
    from PIL import Image

    low, high = float(np.median(pixels)), float(pixels.max())
    pixels = np.clip((pixels - low) / max(high - low, 1e-6), 0, 1)  # paper is not quite white, ink not quite black
    rows, columns = np.nonzero(pixels > _INK)
    result = np.zeros((height, width), dtype=np.float32)
    if len(rows) == 0:
        return result  # a blank image
    ink = pixels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    factor = min(_INNER * height / ink.shape[0], _INNER * width / ink.shape[1])
    size = (max(1, round(ink.shape[1] * factor)), max(1, round(ink.shape[0] * factor)))
    small = np.asarray(Image.fromarray(ink).resize(size, _bilinear()), dtype=np.float32)
    if small.max() > 0:
        small = small / small.max()  # thin lines fade when scaled down
    top, left = (_offset(small.sum(axis=1 - axis), side) for axis, side in ((0, height), (1, width)))
    result[top : top + small.shape[0], left : left + small.shape[1]] = small
    return result


def _offset(mass: np.ndarray, side: int) -> int:
    """The offset that centers the mass within `side` without cropping."""
    center = float((mass * (np.arange(len(mass)) + 0.5)).sum() / max(float(mass.sum()), 1e-6))
    return min(max(round(side / 2 - center), 0), side - len(mass))
