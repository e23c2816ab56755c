"""Transforms of inputs by name: `crop(padding=4), flip`.

Here: each transform as a small class that works on a whole batch, and the table of names. Random transforms apply in
training only; deterministic ones (`normalize`, `resize`, `gray`) apply in testing too. Not here: applying them, and
their random numbers (`augmented.py`). torch is imported only when there is a batch, because the driver reads the names.

A batch of inputs is floats of shape (n, channels, height, width).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.config.spec import Spec
from syncline.errors import ConfigError, DataError, UnknownName, check_options

if TYPE_CHECKING:
    import numpy as np
    import torch

    Draw = Callable[[int], np.ndarray]
    """Returns one number in [0, 1) per sample for the given draw."""

Shape = tuple[int, ...]


class Transform:
    """A transform of a batch of inputs."""

    name: ClassVar[str]
    is_random: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """The shape of one transformed input; DataError if the transform does not apply."""
        if len(shape) != 3:
            raise DataError(f"{self.name} needs images (channels, height, width), but the inputs have shape {shape}.")
        return shape

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Crop(Transform):
    """A random crop of the original size, after padding with `padding` zeros."""

    padding: int = 4

    name = "crop"

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """One gather for the whole batch."""
        import torch

        count, _, height, width = inputs.shape
        padded = torch.nn.functional.pad(inputs, (self.padding,) * 4)
        top, left = (torch.from_numpy((draw(i) * (2 * self.padding + 1)).astype("int64")) for i in (0, 1))
        rows = (top[:, None] + torch.arange(height))[:, None, :, None]
        columns = (left[:, None] + torch.arange(width))[:, None, None, :]
        samples = torch.arange(count)[:, None, None, None]
        return padded[samples, torch.arange(inputs.shape[1])[None, :, None, None], rows, columns]


@dataclass(frozen=True)
class Flip(Transform):
    """Flip left and right with probability `p`."""

    p: float = 0.5

    name = "flip"
    axis: ClassVar[int] = -1

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        import torch

        chosen = torch.from_numpy(draw(0) < self.p)[:, None, None, None]
        return torch.where(chosen, inputs.flip(self.axis), inputs)


@dataclass(frozen=True)
class VerticalFlip(Flip):
    """Flip top and bottom with probability `p`."""

    name = "vertical_flip"
    axis: ClassVar[int] = -2


@dataclass(frozen=True)
class Cutout(Transform):
    """Set a random square of `size` pixels to 0. (T. DeVries and G. W. Taylor, 2017.)"""

    size: int = 8

    name = "cutout"

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The center is anywhere in the image, so part of the square may be outside."""
        import torch

        _, _, height, width = inputs.shape
        keep = torch.zeros(len(inputs), 1, height, width, dtype=torch.bool)
        center = [torch.from_numpy((draw(i) * side).astype("int64"))[:, None] for i, side in ((0, height), (1, width))]
        away = [torch.arange(side) - c + self.size // 2 for side, c in zip((height, width), center, strict=True)]
        down, across = ((a < 0) | (a >= self.size) for a in away)
        keep |= down[:, None, :, None] | across[:, None, None, :]
        return inputs * keep


@dataclass(frozen=True)
class Noise(Transform):
    """Add normal noise of standard deviation `std` to every value."""

    std: float = 0.05

    name = "noise"

    def shape(self, shape: Shape) -> Shape:
        return shape

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """One draw per sample seeds its noise."""
        import torch

        noise = torch.empty_like(inputs)
        for row, number in enumerate(draw(0)):
            noise[row].normal_(0, self.std, generator=torch.Generator().manual_seed(int(number * 2**53)))
        return inputs + noise


@dataclass(frozen=True)
class Normalize(Transform):
    """(x - mean) / std, with one number for all channels or one per channel."""

    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5

    name = "normalize"
    is_random = False

    def shape(self, shape: Shape) -> Shape:
        """Check that there is one number, or one per channel."""
        for numbers in (self.mean, self.std):
            if isinstance(numbers, tuple) and (not shape or len(numbers) != shape[0]):
                raise DataError(f"normalize has {len(numbers)} numbers, but the inputs have shape {shape}.")
        return shape

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:  # noqa: ARG002  # deterministic
        """Along dimension 1: channels or features."""
        import torch

        column = [-1] + [1] * (inputs.dim() - 2)
        mean, std = (torch.as_tensor(n, dtype=inputs.dtype).reshape(column) for n in (self.mean, self.std))
        return (inputs - mean) / std


@dataclass(frozen=True)
class Resize(Transform):
    """Resize images to `size` pixels per side, or (height, width)."""

    size: int | tuple[int, int]

    name = "resize"
    is_random = False

    @property
    def _side(self) -> tuple[int, int]:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def shape(self, shape: Shape) -> Shape:
        return (super().shape(shape)[0], *self._side)

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:  # noqa: ARG002  # deterministic
        import torch

        return torch.nn.functional.interpolate(inputs, self._side, mode="bilinear", align_corners=False, antialias=True)


@dataclass(frozen=True)
class Gray(Transform):
    """Convert RGB to grayscale (ITU-R BT.601)."""

    name = "gray"
    is_random = False

    def shape(self, shape: Shape) -> Shape:
        if super().shape(shape)[0] != 3:
            raise DataError(f"gray needs images with 3 channels, but the inputs have shape {shape}.")
        return (1, *shape[1:])

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:  # noqa: ARG002  # deterministic
        import torch

        return (inputs * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)


_TRANSFORMS = {c.name: c for c in (Crop, Flip, VerticalFlip, Cutout, Noise, Normalize, Resize, Gray)}


def transform_names() -> list[str]:
    return sorted(_TRANSFORMS)


def parse(given: str | Iterable[Any] | None) -> tuple[Any, ...]:
    """The transforms from names in a string or a list; callables, such as torchvision's, pass through."""
    if given is None:
        return ()
    items = _separated(given) if isinstance(given, str) else list(given)
    return tuple(_named(Spec.of(i, what="augment")) if not callable(i) else i for i in items)


def _named(spec: Spec) -> Transform:
    if spec.name not in _TRANSFORMS:
        raise UnknownName.among("transform", spec.name, _TRANSFORMS)
    found = _TRANSFORMS[spec.name]
    known = list(inspect.signature(found).parameters)
    check_options(f"The transform {spec.name}", spec.options, known)
    try:
        return found(**spec.options)
    except TypeError as error:
        example = f"{spec.name}({known[0]}=...)"
        raise ConfigError(f"augment: {spec.name} needs {', '.join(known)}: {example}.") from error


def _separated(text: str) -> Sequence[str]:
    """Split at commas outside of brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]
