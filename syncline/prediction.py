"""Predictions of trained models for images: `syncline predict lenet image.png`, or `syncline.predict` in Python.

Here: loading the model, from a run or from the weights shipped with Syncline, and predicting. Not here: how an image
becomes an input (`data/image_input.py`), and the shipped weights (`models/zoo/pretrained.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from syncline.data.image_input import find_images, read_image
from syncline.data.named import DataInfo
from syncline.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Prediction", "predict"]

_HANDWRITING = ("mnist", "digits")
"""The datasets whose images are ink, light on dark."""
_AT_ONCE = 256


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    image: Path
    label: str
    """The most likely class: its name, or its index if classes have no names."""
    probability: float
    probabilities: dict[str, float]
    """The probability of each class, by name."""


def predict(what: str | Path, images: str | Path | Sequence[str | Path]) -> list[Prediction]:
    """Classify image files, or folders of them, of any size and color mode.

    `what` is a run directory, whose newest checkpoint is used, or a model whose weights ship with Syncline.

    >>> syncline.predict("lenet", "seven.png")[0].label   # doctest: +SKIP
    '7'
    """
    given = [images] if isinstance(images, str | Path) else list(images)
    images = find_images([Path(image) for image in given])
    model, info = _run(Path(what)) if Path(what).is_dir() else _shipped(str(what))
    if len(info.input_shape) != 3 or info.input_shape[0] not in (1, 3) or info.vocabulary is not None:
        raise ConfigError(
            f"{what} was trained on {info.name}, whose samples have the shape {info.input_shape}: these are not "
            "images with 1 or 3 channels. Use the model in Python instead: syncline.train(...).model"
        )
    shape: tuple[int, int, int] = info.input_shape
    is_handwriting = info.name in _HANDWRITING and shape[0] == 1
    found: list[Prediction] = []
    for start in range(0, len(images), _AT_ONCE):
        some = images[start : start + _AT_ONCE]
        inputs = np.stack([read_image(path, shape, is_handwriting=is_handwriting) for path in some])
        found += _classify(model, info, some, inputs)
    return found


def _classify(model: nn.Module, info: DataInfo, images: Sequence[Path], inputs: np.ndarray) -> list[Prediction]:
    import torch

    if info.scale is not None:
        mean, deviation = info.scale
        inputs = (inputs - np.float32(mean)) / np.float32(deviation)
    with torch.inference_mode():
        parts = torch.softmax(model(torch.from_numpy(inputs)), dim=1).tolist()
    names = info.class_names or tuple(map(str, range(info.classes or len(parts[0]))))
    found = []
    for image, row in zip(images, parts, strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        found.append(Prediction(image, names[best], row[best], dict(zip(names, row, strict=True))))
    return found


def _shipped(name: str) -> tuple[nn.Module, DataInfo]:
    from syncline.models.zoo import pretrained

    weights = pretrained.find(name)
    return weights.model(), weights.info


def _run(path: Path) -> tuple[nn.Module, DataInfo]:
    from syncline import task_file
    from syncline.task import LocatedData, Task
    from syncline.telemetry.run_dir import RunDir
    from syncline.workers.entry import load_trained_model

    run_dir = RunDir.owned(path)
    if not run_dir.task_file.exists():
        raise ConfigError(
            f"The task of {path} was too large to store with the run, so its model cannot be rebuilt. Load 'model' "
            "from the checkpoint into your own model."
        )
    task = task_file.read_saved(run_dir.task_file)
    if not isinstance(task, Task) or not isinstance(task.data, LocatedData) or task.data.info.classes is None:
        raise ConfigError(
            f"{path} did not train a classifier on a named dataset, so Syncline does not know how to prepare an "
            "image or what the classes are called. Use the model in Python: syncline.resume(...).model"
        )
    return load_trained_model(task, run_dir), task.data.info
