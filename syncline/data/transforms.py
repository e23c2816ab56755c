"""What may be done to inputs on their way to the model, by name: `crop(padding=4), flip`.

Here: each transform as a small class that works on a whole batch, and the list of their names. What is random is for
training only; what is not (`normalize`, `resize`, `grey`) is for testing, too, and says what shape comes out. Not here:
where the random numbers come from (`draws.py`), and who applies it (`augmented.py`). Nothing here imports torch before
a batch is there, because the driver reads the names.

A batch of inputs is floats of shape (n, channels, height, width), as sources give them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.config.spec import Spec
from syncline.errors import ConfigError, DataError, UnknownName, nearest

if TYPE_CHECKING:
    import numpy as np
    import torch

    Draw = Callable[[int], np.ndarray]
    """Gives, for the number of a draw, one number in [0, 1) for each sample."""

__all__ = ["Transform", "parse", "transform_names"]

Shape = tuple[int, ...]


class Transform:
    """Something done to a batch of inputs."""

    name: ClassVar[str]
    is_random: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """What becomes of the shape of one input; DataError if it cannot be done to such."""
        if len(shape) != 3:
            raise DataError(f"{self.name} is for pictures, (channels, height, width), but the inputs are {shape}.")
        return shape

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The batch after it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Crop(Transform):
    """A random window of the same size, after `padding` zeros were put around the picture."""

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
    """Left and right are exchanged, with probability `p`."""

    p: float = 0.5

    name = "flip"
    axis: ClassVar[int] = -1

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Those that are drawn."""
        import torch

        chosen = torch.from_numpy(draw(0) < self.p)[:, None, None, None]
        return torch.where(chosen, inputs.flip(self.axis), inputs)


@dataclass(frozen=True)
class VerticalFlip(Flip):
    """Top and bottom are exchanged, with probability `p`."""

    name = "vertical_flip"
    axis: ClassVar[int] = -2


@dataclass(frozen=True)
class Cutout(Transform):
    """A random square of `size` pixels becomes 0. (T. DeVries and G. W. Taylor, 2017.)"""

    size: int = 8

    name = "cutout"

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The centre may be anywhere, so that a part of the square may lie outside."""
        import torch

        _, _, height, width = inputs.shape
        keep = torch.zeros(len(inputs), 1, height, width, dtype=torch.bool)
        centre = [torch.from_numpy((draw(i) * side).astype("int64"))[:, None] for i, side in ((0, height), (1, width))]
        away = [torch.arange(side) - c + self.size // 2 for side, c in zip((height, width), centre, strict=True)]
        down, across = ((a < 0) | (a >= self.size) for a in away)
        keep |= down[:, None, :, None] | across[:, None, None, :]
        return inputs * keep


@dataclass(frozen=True)
class Noise(Transform):
    """Normally distributed noise of this `deviation` is added to every value."""

    deviation: float = 0.05

    name = "noise"

    def shape(self, shape: Shape) -> Shape:
        """Any."""
        return shape

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        """One draw seeds the noise of a sample."""
        import torch

        noise = torch.empty_like(inputs)
        for row, number in enumerate(draw(0)):
            noise[row].normal_(0, self.deviation, generator=torch.Generator().manual_seed(int(number * 2**53)))
        return inputs + noise


@dataclass(frozen=True)
class Normalize(Transform):
    """(x - mean) / std, with a number for all channels or one for each."""

    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5

    name = "normalize"
    is_random = False

    def shape(self, shape: Shape) -> Shape:
        """As many numbers as channels, or one."""
        for numbers in (self.mean, self.std):
            if isinstance(numbers, tuple) and (not shape or len(numbers) != shape[0]):
                raise DataError(f"normalize has {len(numbers)} numbers, but the inputs are {shape}.")
        return shape

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:  # noqa: ARG002  # nothing random
        """Along the second dimension, that of channels or features."""
        import torch

        column = [-1] + [1] * (inputs.dim() - 2)
        mean, std = (torch.as_tensor(n, dtype=inputs.dtype).reshape(column) for n in (self.mean, self.std))
        return (inputs - mean) / std


@dataclass(frozen=True)
class Resize(Transform):
    """Pictures of `size` pixels a side, or (height, width)."""

    size: int | tuple[int, int]

    name = "resize"
    is_random = False

    @property
    def _side(self) -> tuple[int, int]:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def shape(self, shape: Shape) -> Shape:
        """The same channels."""
        return (super().shape(shape)[0], *self._side)

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:  # noqa: ARG002  # nothing random
        """Bilinear, with smoothing when it gets smaller."""
        import torch

        return torch.nn.functional.interpolate(inputs, self._side, mode="bilinear", align_corners=False, antialias=True)


@dataclass(frozen=True)
class Grey(Transform):
    """Three channels become one, weighted as the eye does (ITU-R BT.601)."""

    name = "grey"
    is_random = False

    def shape(self, shape: Shape) -> Shape:
        """From three channels."""
        if super().shape(shape)[0] != 3:
            raise DataError(f"grey is for pictures with 3 channels, but the inputs are {shape}.")
        return (1, *shape[1:])

    def __call__(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:  # noqa: ARG002  # nothing random
        """A weighted sum."""
        import torch

        return (inputs * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)


_TRANSFORMS = {c.name: c for c in (Crop, Flip, VerticalFlip, Cutout, Noise, Normalize, Resize, Grey)}


def transform_names() -> list[str]:
    """Every name, sorted."""
    return sorted(_TRANSFORMS)


def parse(given: str | Iterable[Any] | None) -> tuple[Any, ...]:
    """The transforms given by name, in a text or a list; callables, such as torchvision's, stay as they are."""
    if given is None:
        return ()
    items = _separated(given) if isinstance(given, str) else list(given)
    return tuple(_named(Spec.of(i, what="augment")) if not callable(i) else i for i in items)


def _named(spec: Spec) -> Transform:
    if spec.name not in _TRANSFORMS:
        raise UnknownName.among("transform", spec.name, _TRANSFORMS)
    found = _TRANSFORMS[spec.name]
    known = list(inspect.signature(found).parameters)
    for option in spec.options:
        if option not in known:
            close = nearest(option, known)
            hint = f" Did you mean {close[0]!r}?" if close else f" It takes: {', '.join(known) or 'none'}."
            raise ConfigError(f"augment: {spec.name} has no option {option!r}.{hint}")
    try:
        return found(**spec.options)
    except TypeError as error:
        example = f"{spec.name}({known[0]}=...)"
        raise ConfigError(f"augment: {spec.name} needs {', '.join(known)}: {example}.") from error


def _separated(text: str) -> Sequence[str]:
    """At the commas that are in no bracket."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]
