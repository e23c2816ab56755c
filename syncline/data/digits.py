"""The digits data set: 1,797 real handwritten digits of 8x8 pixels, which need no network.

Here: reading the file inside scikit-learn (`in_sklearn.py`), and the fixed split. (E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998; the test part.)
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.data.in_sklearn import REINSTALL, file_in_sklearn
from syncline.data.named import DataInfo, Progress, Split
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Digits"]

TRAIN_SAMPLES = 1437
TEST_SAMPLES = 360
SPLIT_SEED = 1797
"""Of the permutation that splits the samples; part of the data set's definition, so never to be changed."""

_PIXELS = 64
_DARKEST = 16


class Digits:
    """Inputs are float32 of shape (1, 8, 8) from 0 to 1.

    scikit-learn's file has no split of its own and is not in random order. The samples are therefore permuted by
    `numpy.random.RandomState(1797)`, whose stream NumPy has frozen (NEP 19), and the first 1,437 are for training.
    """

    name: str = "digits"

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:  # noqa: ARG002  # nothing to fetch
        """The file inside scikit-learn; `data_dir` plays no part."""
        return file_in_sklearn(self.name, "digits.csv.gz")

    def info(self, path: Path) -> DataInfo:  # noqa: ARG002  # the file has one version only, and `load` checks it
        """Known without reading."""
        return DataInfo(
            name=self.name,
            train_samples=TRAIN_SAMPLES,
            test_samples=TEST_SAMPLES,
            input_shape=(1, 8, 8),
            classes=10,
            scale=None,
            class_names=tuple("0123456789"),
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Float32 inputs (n, 1, 8, 8) and int64 targets (n,)."""
        import numpy as np

        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise DataError(f"{path} cannot be read as digits: {error}. {REINSTALL}") from error
        if table.shape != (TRAIN_SAMPLES + TEST_SAMPLES, _PIXELS + 1):
            raise DataError(
                f"{path} holds a table of shape {table.shape}, but digits has {TRAIN_SAMPLES + TEST_SAMPLES} rows of "
                f"{_PIXELS} pixels and a label. {REINSTALL}"
            )
        order = np.random.RandomState(SPLIT_SEED).permutation(len(table))
        rows = table[order[:TRAIN_SAMPLES] if split == "train" else order[TRAIN_SAMPLES:]]
        inputs = rows[:, :_PIXELS].astype(np.float32).reshape(-1, 1, 8, 8) / np.float32(_DARKEST)
        return inputs, rows[:, _PIXELS].copy()
