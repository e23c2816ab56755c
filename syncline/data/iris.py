"""Iris: 150 flowers, four measures each, three species; needs no network.

Here: reading the file inside scikit-learn, the fixed split, and the standardising. (R. A. Fisher, "The Use of Multiple
Measurements in Taxonomic Problems", 1936.)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from syncline.data.in_sklearn import REINSTALL, file_in_sklearn
from syncline.data.named import DataInfo, Progress, Split
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Iris"]

TRAIN_SAMPLES = 120
TEST_SAMPLES = 30
SPLIT_SEED = 150
"""Of the permutation that splits the samples; part of the data set's definition, so never to be changed."""

CLASS_NAMES = ("setosa", "versicolor", "virginica")

_FEATURES = 4


class Iris:
    """Inputs are float32 of shape (4,): sepal length and width, petal length and width.

    The samples are permuted by `numpy.random.RandomState(150)`, and the first 120 are for training. Each feature has
    mean 0 and deviation 1 over these; the other 30 are moved and scaled by the same numbers.
    """

    name: str = "iris"

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:  # noqa: ARG002  # nothing to fetch
        """The file inside scikit-learn; `data_dir` plays no part."""
        return file_in_sklearn(self.name, "iris.csv")

    def info(self, path: Path) -> DataInfo:  # noqa: ARG002  # the file has one version only, and `load` checks it
        """Known without reading."""
        return DataInfo(
            name=self.name,
            train_samples=TRAIN_SAMPLES,
            test_samples=TEST_SAMPLES,
            input_shape=(_FEATURES,),
            classes=len(CLASS_NAMES),
            scale=None,
            class_names=CLASS_NAMES,
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Float32 inputs (n, 4) and int64 targets (n,)."""
        import numpy as np

        try:
            table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as iris: {error}. {REINSTALL}") from error
        if table.shape != (TRAIN_SAMPLES + TEST_SAMPLES, _FEATURES + 1):
            raise DataError(
                f"{path} holds a table of shape {table.shape}, but iris has {TRAIN_SAMPLES + TEST_SAMPLES} rows of "
                f"{_FEATURES} measures and a species. {REINSTALL}"
            )
        table = table[np.random.RandomState(SPLIT_SEED).permutation(len(table))]
        measures = table[:TRAIN_SAMPLES, :_FEATURES]
        rows = table[:TRAIN_SAMPLES] if split == "train" else table[TRAIN_SAMPLES:]
        inputs = (rows[:, :_FEATURES] - measures.mean(axis=0)) / measures.std(axis=0)
        return inputs.astype(np.float32), rows[:, _FEATURES].astype(np.int64)
