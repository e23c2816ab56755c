"""Features that a trained model has computed of a data set, in a file: training data for any other model.

Here: `StoredFeatures`, a source whose samples stay on disk, and writing it. Not here: which features (`beliefs.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from syncline.config.owned_files import temporary_name
from syncline.data.source import ArraySource, Indices
from syncline.errors import DataError

_LEAST_DEVIATION = 1e-3
"""A feature that hardly changes is not blown up."""


class StoredFeatures(ArraySource):
    """Features of samples, each with mean 0 and deviation 1 over the training data, and targets.

    Only the path travels to the workers, which map the file.
    """

    def __init__(
        self,
        path: Path,
        targets: torch.Tensor,
        mean: torch.Tensor,
        deviation: torch.Tensor,
        test_source: StoredFeatures | None = None,
    ) -> None:
        if not path.is_file():
            raise DataError(
                f"There is no file {path} with stored features any more. Compute them again, with features(...).",
                code="no-features",
                path=str(path),
            )
        self.path, self.mean, self.deviation = path, mean, deviation
        self.test_source = test_source
        """The features of the test data, if there is any: `Task` uses them."""
        stored = np.load(path, mmap_mode="c")[: len(targets)]  # "c": torch wants arrays that it may write to
        super().__init__(torch.from_numpy(stored), targets)

    def fetch(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        features, *rest = super().fetch(indices)
        return (features.float().sub_(self.mean).div_(self.deviation), *rest)

    def first(self, samples: int) -> StoredFeatures:
        """Only so many training samples, with all of the test data."""
        targets = self.tensors[1][:samples]
        return StoredFeatures(self.path, targets, self.mean, self.deviation, self.test_source)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredFeatures, (self.path, self.tensors[1], self.mean, self.deviation, self.test_source)


def store(path: Path, count: int, size: int, blocks: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `blocks` of features, `count` rows of `size` together, to a file in half precision: mean and deviation."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = temporary_name(path)
    total, squares = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    try:
        stored = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float16, shape=(count, size))
        unfinished.chmod(0o600)
        row = 0
        for block in blocks:
            half = block.half()
            stored[row : row + len(half)] = half.numpy()
            row += len(half)
            exact = half.double()
            total += exact.sum(0)
            squares += exact.square().sum(0)
        stored.flush()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), deviation.clamp(min=_LEAST_DEVIATION).float()


def computed(
    path: Path, inputs: Callable[[int, int], torch.Tensor], count: int, model: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`store` the answers of `model` to `count` inputs, some at a time."""
    at_once = 500
    size = model(inputs(0, 1)).shape[1]
    blocks = (model(inputs(low, min(low + at_once, count))) for low in range(0, count, at_once))
    return store(path, count, size, blocks)
