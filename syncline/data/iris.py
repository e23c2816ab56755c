"""Iris: 150 flowers, four features each, three species; no network needed.

Here: its facts, and standardization. Not here: reading the file in scikit-learn (`sklearn_files.py`). (R. A. Fisher,
"The Use of Multiple Measurements in Taxonomic Problems", 1936.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.data.sklearn_files import SklearnTable

if TYPE_CHECKING:
    import numpy as np


class Iris(SklearnTable):
    """Inputs are float32 of shape (4,): sepal length and width, petal length and width.

    Each feature has mean 0 and standard deviation 1 over the training samples; the test samples are standardized with
    the same numbers.
    """

    name = "iris"
    file = "iris.csv"
    header_rows = 1
    train_samples, test_samples, split_seed = 120, 30, 150
    input_shape = (4,)
    class_names = ("setosa", "versicolor", "virginica")

    def scaled(self, values: np.ndarray, of_train: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = (values - of_train.mean(axis=0)) / of_train.std(axis=0)
        return scaled
