"""A source that applies transforms to its inputs.

Here: `AugmentedSource`, and `uniform`, the random numbers of each sample: a pure function of the run's seed, the epoch,
the sample and the purpose. It is counter-based, so neither the number of workers nor resuming changes anything. The
mixing is that of SplitMix64. (G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number Generators",
2014.) Not here: the transforms (`transforms.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from syncline.data.order import Share
from syncline.data.random_state import generators_kept, seed_torch
from syncline.data.source import Indices, Source, WrappedSource
from syncline.data.transforms import Transform
from syncline.errors import DataError

_DRAWS = 16
"""The most random numbers that one transform may draw for a sample."""


class AugmentedSource(WrappedSource):
    """The samples of `base` with `transforms` applied to their inputs; test data gets only the deterministic ones."""

    def __init__(
        self, base: Source, transforms: Sequence[Transform | Callable[..., Any]], *, seed: int, is_training: bool
    ) -> None:
        super().__init__(base)
        self._seed = seed
        self._transforms = [
            (number, transform)
            for number, transform in enumerate(transforms)
            if is_training or (isinstance(transform, Transform) and not transform.is_random)
        ]

    def fetch(self, indices: Indices) -> Any:
        """The samples, transformed as in the first epoch."""
        wanted = np.asarray(indices, np.int64)
        return self._transformed(self.base.fetch(wanted), np.zeros_like(wanted), wanted)

    def of_share(self, batch: Any, share: Share) -> Any:
        """The batch that `base` fetched for a share, each sample transformed as in its epoch."""
        if not len(share.indices):  # an empty share still fetches one sample, for its shape
            return self._transformed(batch, np.asarray([share.position.epoch]), np.zeros(1, np.int64))
        epochs = np.concatenate([np.full(high - low, epoch, np.int64) for epoch, low, high in share.ranges])
        return self._transformed(batch, epochs, np.asarray(share.indices, np.int64))

    def _transformed(self, batch: Any, epochs: np.ndarray, indices: np.ndarray) -> Any:
        inputs, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(inputs, torch.Tensor):
            raise DataError(f"augment needs inputs that are tensors, but these are {type(inputs).__name__}.")
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
    """The base of an `AugmentedSource`, or the source itself."""
    return source.base if isinstance(source, AugmentedSource) else source


def _seeded(transform: Callable[..., Any], sample: torch.Tensor, number: float) -> torch.Tensor:
    """Apply a user's callable, such as one of torchvision, with all global generators seeded for this sample."""
    with generators_kept():
        random.seed(number)
        np.random.seed(int(number * 2**32))
        seed_torch(int(number * 2**53))
        return torch.as_tensor(transform(sample))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, epochs: np.ndarray, indices: np.ndarray, purpose: int) -> np.ndarray:
    """One float64 in [0, 1) for each sample (epochs[i], indices[i]); `purpose` distinguishes several draws."""
    state = np.full(len(indices), seed, np.uint64)
    for word in (epochs, indices, np.full(len(indices), purpose)):
        state = _mixed(state + _GOLDEN + word.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
