"""Data sets known by name: what one must offer, and which there are.

Here: the `NamedData` protocol, its `DataInfo`, and the registry. Not here: the data sets themselves (one file each:
`digits.py`, `mnist.py`), or downloading (`download.py`). The driver asks for names, places and shapes before any
worker exists, so nothing here imports torch, and numpy only when samples are really loaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from syncline.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

__all__ = ["DataInfo", "NamedData", "Progress", "Split", "named", "names"]

Progress = Callable[[str, int, int | None], None]
"""Told how a download goes: label, bytes done, bytes in total (None where unknown). May be called very often."""

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """What a model and a plan need to know of a data set before it is loaded.

    Attributes:
        name: The name it is known by.
        train_samples: Samples to train on.
        test_samples: Samples held back for evaluation.
        input_shape: The shape of one input, without the batch dimension.
        classes: How many classes the targets have; None if they are not classes.
        scale: (mean, deviation) of inputs kept as bytes, for `(x / 255 - mean) / deviation`; None if the inputs are
            floats that need nothing more.
        vocabulary: If the inputs are tokens, int64 numbers below this, and the targets are of the same shape: the token
            that follows each; None for all other data.
        class_names: What the classes are called, in order, where that is known.
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
    """A data set known by name. Adding one means adding a file and a line in this module's registry."""

    name: str

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:
        """The file or folder that holds the data, downloaded if it must be; DataError if it cannot be had."""

    def info(self, path: Path) -> DataInfo:
        """Counts and shapes of the data at `path`, without reading it all."""

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
    """Every name `named` knows, sorted."""
    return sorted(_MODULES)


def named(name: str, **options: Any) -> NamedData:
    """The data set called `name` with these options, such as the length of a window.

    UnknownName, with the nearest names, if there is none; ConfigError if it has no such option.
    """
    if name not in _MODULES:
        raise UnknownName.among("data set", name, _MODULES)
    module, attribute = _MODULES[name]
    data_set = getattr(importlib.import_module(module), attribute)
    known = list(inspect.signature(data_set).parameters)
    for option in options:
        if option not in known:
            has = f"Its options are: {', '.join(known)}." if known else "It has none."
            raise ConfigError(f"The data set {name} has no option {option!r}. {has}")
    return cast("NamedData", data_set(**options))
