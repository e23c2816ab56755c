"""Datasets by name: their interface and their registry.

Here: the `NamedData` protocol, its `DataInfo`, and the registry. Not here: the datasets (one file each: `digits.py`,
`mnist.py`), and downloading (`download.py`). The driver reads names, paths and shapes before any worker starts, so
nothing here imports torch, and NumPy is imported only to load samples.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from syncline.errors import UnknownName, check_options

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

Progress = Callable[[str, int, int | None], None]
"""Reports download progress: label, bytes done, total bytes (None if unknown). May be called very often."""

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The facts about a dataset that a model and a plan need before it is loaded.

    Attributes:
        name: Its name.
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        input_shape: Shape of one input, without the batch dimension.
        classes: Number of classes; None for regression.
        scale: (mean, std) of inputs that are bytes, for `(x / 255 - mean) / std`; None if inputs are floats already.
        vocabulary: Number of distinct tokens, if inputs are int64 tokens and targets the next tokens; else None.
        class_names: Names of the classes in order, if known.
    """

    name: str
    train_samples: int
    test_samples: int
    input_shape: tuple[int, ...]
    classes: int | None
    scale: tuple[float, float] | None
    vocabulary: int | None = None
    class_names: tuple[str, ...] | None = None


class NamedData(Protocol):
    """A dataset with a name. To add one, add a file and a line in this module's registry."""

    name: str

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:
        """The file or folder with the data, downloaded if necessary; DataError if that fails."""

    def info(self, path: Path) -> DataInfo:
        """Counts and shapes of the data at `path`, without reading all of it."""

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and int64 targets of one split of the data at `path`, both writable."""


_MODULES = {
    "cifar10": ("syncline.data.cifar10", "Cifar10"),
    "digits": ("syncline.data.digits", "Digits"),
    "fashion-mnist": ("syncline.data.fashion_mnist", "FashionMnist"),
    "iris": ("syncline.data.iris", "Iris"),
    "mnist": ("syncline.data.mnist", "Mnist"),
    "shakespeare": ("syncline.data.shakespeare", "Shakespeare"),
}


def names() -> list[str]:
    return sorted(_MODULES)


def named(name: str, **options: Any) -> NamedData:
    """The dataset called `name` with these options, such as the length of a window.

    UnknownName if there is no such dataset or option.
    """
    if name not in _MODULES:
        raise UnknownName.among("dataset", name, _MODULES)
    module, attribute = _MODULES[name]
    data_set = getattr(importlib.import_module(module), attribute)
    check_options(f"The dataset {name}", options, inspect.signature(data_set).parameters)
    return cast("NamedData", data_set(**options))
