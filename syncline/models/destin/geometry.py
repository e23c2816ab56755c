"""Which node sees what: patches of an image, groups of nodes in the layer below, and movements of the image.

Here: `Geometry`, checked against the shape of the images, and pure functions of tensors. Not here: what a node does
with what it sees (`cells.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import ConfigError


@dataclass(frozen=True)
class Geometry:
    """Square layers of `sides` nodes a side over images of `shape`, (channels, height, width).

    >>> Geometry((1, 28, 28), (8, 4, 2, 1)).patch
    (4, 4)
    """

    shape: tuple[int, ...]
    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        for below, above in itertools.pairwise(self.sides):
            if below % above or below == above:
                raise ConfigError(
                    f"The grid {self.sides} of the model 'destin' has a layer of {above} x {above} nodes above one of "
                    f"{below} x {below}, but each node needs the same number of nodes below it, more than one. Let "
                    f"each number be a divisor of the one before, for example {_halved(self.sides[0])}.",
                    code="destin-grid",
                    grid=self.sides,
                )
        if len(self.shape) != 3:
            raise ConfigError(
                f"The model 'destin' cannot take samples of shape {self.shape}: its nodes divide images (channels, "
                "height, width) among them. Reshape the samples, for example to (1, 28, 28).",
                code="destin-shape",
                shape=self.shape,
            )
        for side in self.shape[1:]:
            patch = -(-side // self.sides[0])
            if patch * self.sides[0] - side > patch:  # a node at the edge would see nothing but padding
                raise ConfigError(self._misfit(side), code="destin-size", side=side, grid=self.sides)

    def _misfit(self, side: int) -> str:
        first = self.sides[0]
        fitting = max((n for n in range(1, side + 1) if side % n == 0 and n <= first), default=1)
        below, above = side // first * first, -(-side // first) * first
        sizes = f"{below} or {above}" if below else f"{above}"
        return (
            f"The images have a side of {side} pixels, which cannot be divided among the {first} nodes in a row of the "
            f"grid {self.sides}: patches of {-(-side // first)} pixels would leave nodes at the edge with padding "
            f"only. Use a grid that fits, for example grid={_halved(fitting)}, or resize the images to a side of "
            f'{sizes}: --augment "resize(size={above})".'
        )

    @property
    def patch(self) -> tuple[int, int]:
        """The height and width of what a node of the lowest layer sees."""
        return -(-self.shape[1] // self.sides[0]), -(-self.shape[2] // self.sides[0])

    def fan_in(self, layer: int) -> int:
        """How many nodes of the layer below a node of this `layer` has."""
        return (self.sides[layer - 1] // self.sides[layer]) ** 2

    def views(self, images: Tensor, movements: int) -> Iterator[Tensor]:
        """Each image as it moves, padded so that it can be divided: the first view is the image itself."""
        path = list(itertools.islice(spiral(), movements))
        reach = max((max(abs(y), abs(x)) for y, x in path), default=0)
        height, width = (n * self.sides[0] for n in self.patch)
        top, left = (height - images.shape[2]) // 2, (width - images.shape[3]) // 2
        bottom, right = height - images.shape[2] - top, width - images.shape[3] - left
        around = (left + reach, right + reach, top + reach, bottom + reach)
        padded = torch.nn.functional.pad(images, around, mode="replicate")
        for y, x in path:
            yield padded[:, :, reach + y : reach + y + height, reach + x : reach + x + width]

    def patches(self, view: Tensor) -> Tensor:
        """[samples, nodes, numbers in a patch]."""
        samples, channels = view.shape[:2]
        side, (height, width) = self.sides[0], self.patch
        cut = view.reshape(samples, channels, side, height, side, width).permute(0, 2, 4, 1, 3, 5)
        return cut.reshape(samples, side * side, -1)

    def children(self, beliefs: Tensor, layer: int) -> Tensor:
        """What the nodes of `layer` see of the [samples, nodes, clusters] below: [samples, nodes, beliefs of each]."""
        samples, _, clusters = beliefs.shape
        side, ratio = self.sides[layer], self.sides[layer - 1] // self.sides[layer]
        cut = beliefs.reshape(samples, side, ratio, side, ratio, clusters).permute(0, 1, 3, 2, 4, 5)
        return cut.reshape(samples, side * side, -1)

    def of_parents(self, values: Tensor, layer: int) -> Tensor:
        """What the parents of the nodes of `layer` have, [samples, parents, ...], for each of these nodes."""
        ratio = self.sides[layer] // self.sides[layer + 1]
        samples, _, *rest = values.shape
        square = values.reshape(samples, self.sides[layer + 1], self.sides[layer + 1], *rest)
        each = square.repeat_interleave(ratio, 1).repeat_interleave(ratio, 2)
        return each.reshape(samples, self.sides[layer] ** 2, *rest)


def spiral() -> Iterator[tuple[int, int]]:
    """Movements by one pixel, around and away from the middle: (0, 0), (0, 1), (1, 1), (1, 0), (1, -1), ..."""
    y = x = 0
    yield y, x
    directions = itertools.cycle(((0, 1), (1, 0), (0, -1), (-1, 0)))
    for length in itertools.count(1):
        for down, right in itertools.islice(directions, 2):
            for _ in range(length):
                y, x = y + down, x + right
                yield y, x


def _halved(side: int) -> Sequence[int]:
    """The layers from `side` nodes a side to one."""
    found = [side]
    while found[-1] > 1:
        found.append(found[-1] // 2 if found[-1] % 2 == 0 else 1)
    return tuple(found)
