"""Predictions of trained models for images: `syncline predict lenet image.png`, or `syncline.predict` in Python.

Here: images to predictions, with torch or with an exported model. Not here: how an image becomes an input
(`data/image_input.py`), loading the model (`serving/trained.py`), and files of rows (`serving/scoring/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from syncline.data.image_input import find_images, read_image
from syncline.errors import ConfigError, UnknownName
from syncline.models.answers import LOGITS, PROBABILITIES

__all__ = ["Prediction", "predict"]

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
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    """The outputs and layers that were asked for, by name."""


class _Model(NamedTuple):
    """What predicts: images from 0 to 1 to outputs by name."""

    shape: tuple[int, ...]
    is_image: bool
    is_classifier: bool
    data: str
    is_handwriting: bool
    class_names: tuple[str, ...] | None
    answer: Callable[[np.ndarray], Mapping[str, np.ndarray]]


def predict(
    what: str | Path, images: str | Path | Sequence[str | Path], *, outputs: Sequence[str] = ()
) -> list[Prediction]:
    """Classify image files, or folders of them, of any size and color mode.

    `what` is a run directory, whose newest checkpoint is used, an exported ONNX file, or a model whose weights ship
    with Syncline. `outputs` are names of outputs or layers to return as well.

    >>> syncline.predict("lenet", "seven.png")[0].label   # doctest: +SKIP
    '7'
    """
    given = [images] if isinstance(images, str | Path) else list(images)
    images = find_images([Path(image) for image in given])
    model = _exported(Path(what), outputs) if Path(what).suffix == ".onnx" else _trained(what, outputs)
    _check(what, model)
    shape = model.shape[0], model.shape[1], model.shape[2]
    found: list[Prediction] = []
    for start in range(0, len(images), _AT_ONCE):
        some = images[start : start + _AT_ONCE]
        inputs = np.stack([read_image(path, shape, is_handwriting=model.is_handwriting) for path in some])
        found += _predictions(model, some, model.answer(inputs), outputs)
    return found


def _check(what: str | Path, model: _Model) -> None:
    if not model.is_classifier:
        raise ConfigError(
            f"{what} is no classifier of images, so Syncline does not know what its outputs mean. Use the model in "
            "Python: syncline.resume(...).model",
            code="not-a-classifier", model=str(what),
        )  # fmt: skip
    if not model.is_image:
        raise ConfigError(
            f"{what} was trained on {model.data}, whose samples have the shape {model.shape}: these are not images "
            "with 1 or 3 channels of a dataset with a name or in files. Score files of rows with --data, or use the "
            "model in Python: syncline.train(...).model",
            code="not-images", model=str(what), shape=model.shape,
        )  # fmt: skip


def _predictions(
    model: _Model, images: Sequence[Path], found: Mapping[str, np.ndarray], outputs: Sequence[str]
) -> list[Prediction]:
    probabilities = found[PROBABILITIES]
    names = model.class_names or tuple(map(str, range(probabilities.shape[1])))
    predictions = []
    for k, image in enumerate(images):
        row = probabilities[k].tolist()
        best = max(range(len(row)), key=row.__getitem__)
        extra = {name: found[name][k] for name in outputs}
        predictions.append(Prediction(image, names[best], row[best], dict(zip(names, row, strict=True)), extra))
    return predictions


def _trained(what: str | Path, outputs: Sequence[str]) -> _Model:
    import torch

    from syncline.models.named_outputs import NamedOutputs
    from syncline.serving.trained import trained_model

    model = trained_model(what)
    named = NamedOutputs(model.module, model.answers, list(dict.fromkeys([PROBABILITIES, *outputs])))

    def answer(inputs: np.ndarray) -> dict[str, np.ndarray]:
        # The preparation scales bytes; a picture that was scaled down has fractions of them.
        stored = inputs * np.float32(255) if model.preparation.scale is not None else inputs
        with torch.inference_mode():
            return {name: value.numpy() for name, value in named(model.preparation(torch.from_numpy(stored))).items()}

    return _Model(
        model.shape, model.kind == "image", model.answers == "classes" and model.kind != "text", model.data,
        model.is_handwriting, model.class_names, answer,
    )  # fmt: skip


def _exported(path: Path, outputs: Sequence[str]) -> _Model:
    from syncline.serving.metadata import metadata_of, open_session

    session = open_session(path)
    facts = metadata_of(session, str(path))
    # A file with the outputs `fc1,logits` has no probabilities, which follow from the logits.
    has_logits_only = PROBABILITIES not in facts.output_names and LOGITS in facts.output_names
    names = list(dict.fromkeys([LOGITS if has_logits_only else PROBABILITIES, *outputs]))
    for name in names:
        if name not in facts.output_names:
            more = f"Export the run again with --outputs {','.join([*facts.output_names, name])}."
            raise UnknownName.among("output", name, facts.output_names, more=more)
    one = facts.inputs[0]

    def answer(inputs: np.ndarray) -> dict[str, np.ndarray]:
        stored = np.rint(inputs * np.float32(255)).astype(np.uint8) if one.dtype == "uint8" else inputs
        found = dict(zip(names, session.run(names, {one.name: stored}), strict=True))
        return found if not has_logits_only else {PROBABILITIES: _softmax(found[LOGITS]), **found}

    return _Model(
        one.shape, facts.kind == "image", facts.answers == "classes" and facts.kind != "text", facts.data,
        facts.is_handwriting, facts.class_names, answer,
    )  # fmt: skip


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    found: np.ndarray = exponentials / exponentials.sum(1, keepdims=True)
    return found
