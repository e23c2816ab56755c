"""The digits dataset: 1,797 real handwritten digits of 8x8 pixels, no network needed.

Here: its facts, and scaling. Not here: reading the file in scikit-learn (`sklearn_files.py`). (E. Alpaydin and C.
Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998; the test part.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.data.sklearn_files import SklearnTable

if TYPE_CHECKING:
    import numpy as np

_DARKEST = 16


class Digits(SklearnTable):
    """Inputs are float32 of shape (1, 8, 8) from 0 to 1."""

    name = "digits"
    file = "digits.csv.gz"
    number = int
    train_samples, test_samples, split_seed = 1437, 360, 1797
    input_shape = (1, 8, 8)
    class_names = tuple("0123456789")

    def scaled(self, values: np.ndarray, of_train: np.ndarray) -> np.ndarray:  # noqa: ARG002  # a fixed scale
        return values / _DARKEST
