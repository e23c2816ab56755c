"""Datasets that are files in the scikit-learn package.

Here: `SklearnTable`, the base class of such datasets: it finds the file, reads it, and splits its rows. scikit-learn is
never imported, because that takes more than a second and only one file is needed. Not here: the datasets (`digits.py`,
`iris.py`).
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from syncline.data.named import DataInfo, Progress, Split
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

REINSTALL = "Reinstall scikit-learn: pip install --force-reinstall scikit-learn"


class SklearnTable:
    """A table with a row for each sample: the input's values, then the class index.

    The files have no split of their own and are not in random order. The rows are therefore permuted by
    `numpy.random.RandomState(split_seed)`, whose stream NumPy has frozen (NEP 19), and the first are for training.
    """

    name: str
    file: ClassVar[str]
    header_rows: ClassVar[int] = 0
    number: ClassVar[type] = float
    """The type of all values in the file: `int` refuses a file with fractions."""
    train_samples: ClassVar[int]
    test_samples: ClassVar[int]
    split_seed: ClassVar[int]
    """Part of the dataset's definition, so it must never change."""
    input_shape: ClassVar[tuple[int, ...]]
    class_names: ClassVar[tuple[str, ...]]

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:  # noqa: ARG002  # nothing to fetch
        """The file inside scikit-learn; `data_dir` is not used."""
        package = importlib.util.find_spec("sklearn")
        if package is None or not package.submodule_search_locations:
            raise DataError(
                f"The dataset {self.name!r} is a file in scikit-learn, which is not installed. Install it: "
                "pip install scikit-learn"
            )
        path = Path(package.submodule_search_locations[0], "datasets", "data", self.file)
        if not path.is_file():
            raise DataError(f"The dataset {self.name!r} should be at {path}, but there is no such file. {REINSTALL}")
        return path

    def info(self, path: Path) -> DataInfo:  # noqa: ARG002  # the file has only one version, which `load` verifies
        return DataInfo(
            name=self.name,
            train_samples=self.train_samples,
            test_samples=self.test_samples,
            input_shape=self.input_shape,
            classes=len(self.class_names),
            scale=None,
            class_names=self.class_names,
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Float32 inputs (n, ...) and int64 targets (n,)."""
        import numpy as np

        try:
            table: np.ndarray = np.loadtxt(path, delimiter=",", dtype=self.number, skiprows=self.header_rows, ndmin=2)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise DataError(f"{path} cannot be read as {self.name}: {error}. {REINSTALL}") from error
        rows, values = self.train_samples + self.test_samples, math.prod(self.input_shape)
        if table.shape != (rows, values + 1):
            raise DataError(
                f"{path} holds a table of shape {table.shape}, but {self.name} has {rows} rows of {values} values and "
                f"a label. {REINSTALL}"
            )
        if not np.isin(table[:, -1], range(len(self.class_names))).all():
            raise DataError(f"{path} has labels other than 0 to {len(self.class_names) - 1}. {REINSTALL}")
        table = table[np.random.RandomState(self.split_seed).permutation(rows)]
        train, test = table[: self.train_samples], table[self.train_samples :]
        chosen = train if split == "train" else test
        inputs = self.scaled(chosen[:, :-1], train[:, :-1]).astype(np.float32).reshape(-1, *self.input_shape)
        return inputs, chosen[:, -1].astype(np.int64)

    def scaled(self, values: np.ndarray, of_train: np.ndarray) -> np.ndarray:
        """The inputs from the values in the file; `of_train` are those of the training samples."""
        raise NotImplementedError
