"""What a trained model says of pictures: `syncline predict lenet image.png`, and `syncline.predict` in Python.

Here: finding the model with its weights, in a run or among those that are shipped, and asking it. Not here: how a
picture becomes an input (`pictures.py`), and the shipped weights (`zoo/shipped.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from syncline.data.named import DataInfo
from syncline.errors import ConfigError
from syncline.inference.pictures import find_pictures, read_picture

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Prediction", "predict"]

_HANDWRITING = ("mnist", "digits")
"""The data sets in which pictures are ink, light on dark."""
_AT_ONCE = 256


@dataclass(frozen=True)
class Prediction:
    """What the model says of one picture."""

    image: Path
    label: str
    """The class that it is most likely to be: its name, or its number if classes have no names."""
    probability: float
    probabilities: dict[str, float]
    """Of every class."""


def predict(what: str | Path, images: str | Path | Sequence[str | Path]) -> list[Prediction]:
    """The classes of pictures: files, or folders of them, of any size and colour.

    `what` is a run directory, whose newest checkpoint is taken, or a model whose weights come with Syncline.

    >>> syncline.predict("lenet", "seven.png")[0].label   # doctest: +SKIP
    '7'
    """
    given = [images] if isinstance(images, str | Path) else list(images)
    pictures = find_pictures([Path(image) for image in given])
    model, info = _run(Path(what)) if Path(what).is_dir() else _shipped(str(what))
    if len(info.input_shape) != 3 or info.input_shape[0] not in (1, 3) or info.vocabulary is not None:
        raise ConfigError(
            f"{what} was trained on {info.name}, whose samples have the shape {info.input_shape}: these are not "
            "pictures of one or three colours. Use the model in Python instead: syncline.train(...).model"
        )
    shape: tuple[int, int, int] = info.input_shape
    is_handwriting = info.name in _HANDWRITING and shape[0] == 1
    found: list[Prediction] = []
    for start in range(0, len(pictures), _AT_ONCE):
        some = pictures[start : start + _AT_ONCE]
        inputs = np.stack([read_picture(path, shape, is_handwriting=is_handwriting) for path in some])
        found += _ask(model, info, some, inputs)
    return found


def _ask(model: nn.Module, info: DataInfo, pictures: Sequence[Path], inputs: np.ndarray) -> list[Prediction]:
    import torch

    if info.scale is not None:
        mean, deviation = info.scale
        inputs = (inputs - np.float32(mean)) / np.float32(deviation)
    with torch.inference_mode():
        parts = torch.softmax(model(torch.from_numpy(inputs)), dim=1).tolist()
    names = info.class_names or tuple(map(str, range(info.classes or len(parts[0]))))
    told = []
    for image, row in zip(pictures, parts, strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        told.append(Prediction(image, names[best], row[best], dict(zip(names, row, strict=True))))
    return told


def _shipped(name: str) -> tuple[nn.Module, DataInfo]:
    from syncline.zoo import shipped

    weights = shipped.find(name)
    return weights.model(), weights.info


def _run(path: Path) -> tuple[nn.Module, DataInfo]:
    from syncline import payload
    from syncline.task import LocatedData, Task
    from syncline.telemetry.run_dir import RunDir
    from syncline.workers.entry import load_trained_model

    run_dir = RunDir.existing(path)
    if not run_dir.payload.exists():
        raise ConfigError(
            f"The task of {path} was too large to be kept with the run, so its model cannot be built here. Load the "
            "checkpoint's 'model' into a model of your own."
        )
    task = payload.read(run_dir.payload)
    if not isinstance(task, Task) or not isinstance(task.data, LocatedData) or task.data.info.classes is None:
        raise ConfigError(
            f"{path} is not the run of a classifier on data with a name, so it is not known how a picture becomes its "
            "input, and what its outputs are called. Use the model in Python: syncline.resume(...).model"
        )
    return load_trained_model(task, run_dir), task.data.info
