"""A source whose inputs are transformed on their way to the model.

Here: `AugmentedSource`, which gives each sample the random numbers that belong to it in its epoch. Not here: the
transforms (`transforms.py`), or the numbers (`draws.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from syncline.data.draws import uniform
from syncline.data.order import Share
from syncline.data.source import Indices, Source
from syncline.data.transforms import Transform
from syncline.errors import DataError

__all__ = ["AugmentedSource", "untransformed"]

_DRAWS = 16
"""How many draws one transform may make of a sample."""


class AugmentedSource:
    """The samples of `base` with `transforms` done to their inputs; of a test set, only those that are not random."""

    def __init__(
        self, base: Source, transforms: Sequence[Transform | Callable[..., Any]], *, seed: int, is_training: bool
    ) -> None:
        self.base = base
        self._seed = seed
        self._transforms = [
            (number, transform)
            for number, transform in enumerate(transforms)
            if is_training or (isinstance(transform, Transform) and not transform.is_random)
        ]

    def __len__(self) -> int:
        return len(self.base)

    @property
    def group_sizes(self) -> np.ndarray | None:
        """As the source has them."""
        return getattr(self.base, "group_sizes", None)

    @property
    def window(self) -> int:
        """As the source has it."""
        return getattr(self.base, "window", 1)

    def fetch(self, indices: Indices) -> Any:
        """The samples as they are in the first epoch."""
        wanted = np.asarray(indices, np.int64)
        return self._transformed(self.base.fetch(wanted), np.zeros_like(wanted), wanted)

    def of_share(self, batch: Any, share: Share) -> Any:
        """What `base` gave for a share, transformed; each sample as it is in the epoch to which it belongs."""
        if not len(share.indices):  # one sample that shows what samples look like
            return self._transformed(batch, np.asarray([share.position.epoch]), np.zeros(1, np.int64))
        epochs = np.concatenate([np.full(high - low, epoch, np.int64) for epoch, low, high in share.ranges])
        return self._transformed(batch, epochs, np.asarray(share.indices, np.int64))

    def _transformed(self, batch: Any, epochs: np.ndarray, indices: np.ndarray) -> Any:
        inputs, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(inputs, torch.Tensor):
            raise DataError(f"augment is for inputs that are tensors, but these are {type(inputs).__name__}.")
        for number, transform in self._transforms:

            def draw(which: int, number: int = number) -> np.ndarray:
                return uniform(self._seed, epochs, indices, number * _DRAWS + which)

            if isinstance(transform, Transform):
                transform.shape(tuple(inputs.shape[1:]))
                inputs = transform(inputs, draw)
            else:
                inputs = torch.stack([_seeded(transform, x, u) for x, u in zip(inputs, draw(0), strict=True)])
        return (inputs, *others) if isinstance(batch, (tuple, list)) else inputs


def untransformed(source: Source) -> Source:
    """The source that is behind an `AugmentedSource`, or the source itself."""
    return source.base if isinstance(source, AugmentedSource) else source


def _seeded(transform: Callable[..., Any], sample: torch.Tensor, number: float) -> torch.Tensor:
    """A user's own callable, torchvision's say, with every generator that it may use seeded for this sample."""
    with _generators_kept():
        random.seed(number)
        np.random.seed(int(number * 2**32))
        torch.manual_seed(int(number * 2**53))
        return torch.as_tensor(transform(sample))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """The generators of the process go on afterwards as if nothing had been drawn."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
