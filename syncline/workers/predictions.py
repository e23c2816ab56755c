"""Which classes a model confuses, and its most confident mistakes, collected during an evaluation.

Here: `PredictionTally`, one worker's part, which is merged with the other workers'; and small pictures of inputs. Not
here: evaluating (`evaluate.py`), the file that is written (`telemetry/predictions.py`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from syncline.data.source import Source
from syncline.models.destin.network import DestinNetwork
from syncline.models.destin.pictures import pictures_of
from syncline.telemetry.centroids import Centroids, LayerPictures
from syncline.telemetry.predictions import Example, Pair, Picture, Predictions
from syncline.workers.forward import is_classification

_EXAMPLES = 24
_LARGEST_SIDE = 64
"""Larger pictures are scaled down: they only need to be recognizable."""

_Wrong = tuple[float, int, int, int]
"""Confidence, index, target, predicted class."""


class PredictionTally:
    """The predictions of one worker in one evaluation."""

    def __init__(self) -> None:
        self._classes = 0
        self._pairs: Counter[int] = Counter()  # by target * classes + prediction
        self._wrong: list[_Wrong] = []

    def add(self, output: Any, target: Any, first: int) -> None:
        """Count the outputs for the samples from index `first` on; ignored if this is not a classification."""
        if not is_classification(output, target):
            return
        self._classes = output.shape[1]
        answers = output.argmax(1)
        self._pairs.update((target * self._classes + answers).tolist())
        wrong = (answers != target).nonzero().flatten()
        if len(wrong):
            confidence = output[wrong].float().softmax(1).amax(1)
            top = confidence.topk(min(_EXAMPLES, len(wrong)))
            places = wrong[top.indices]
            found = (
                top.values.tolist(),
                (places + first).tolist(),
                target[places].tolist(),
                answers[places].tolist(),
            )
            self._wrong = _most_confident([*self._wrong, *zip(*found, strict=True)])

    def state(self) -> dict[str, Any]:
        """Plain data, for the other workers."""
        return {"classes": self._classes, "pairs": dict(self._pairs), "wrong": self._wrong}

    @classmethod
    def merged(cls, states: list[dict[str, Any]]) -> PredictionTally:
        """The tally of all workers."""
        whole = cls()
        for state in states:
            whole._classes = max(whole._classes, state["classes"])
            whole._pairs.update(state["pairs"])
            whole._wrong = _most_confident([*whole._wrong, *(tuple(w) for w in state["wrong"])])
        return whole

    def summarize(self, test: Source, *, epoch: int, step: int, class_names: list[str] | None) -> Predictions | None:
        """The content of predictions.json, with pictures; None if this is not a classification."""
        if not self._classes:
            return None
        indices = np.array([index for _, index, _, _ in self._wrong], np.int64)
        inputs = _first_of(test.fetch(indices)) if len(indices) else None
        examples = [
            Example(
                index, target, answer, round(confidence, 4), picture_of(inputs[row]) if inputs is not None else None
            )
            for row, (confidence, index, target, answer) in enumerate(self._wrong)
        ]
        pairs = [Pair(*divmod(code, self._classes), count) for code, count in sorted(self._pairs.items())]
        return Predictions(
            epoch=epoch, step=step, classes=self._classes, pairs=pairs, examples=examples, class_names=class_names
        )


def picture_of(sample: torch.Tensor) -> Picture | None:
    """An input as a small picture, lowest value black, highest white; None if it is no image."""
    if sample.dim() == 2:
        sample = sample[None]
    if sample.dim() != 3 or sample.shape[0] not in (1, 3) or min(sample.shape[1:]) < 2:
        return None
    values = sample.detach().cpu().float()
    height, width = values.shape[1:]
    if max(height, width) > _LARGEST_SIDE:
        scale = _LARGEST_SIDE / max(height, width)
        size = (max(round(height * scale), 1), max(round(width * scale), 1))
        values = torch.nn.functional.adaptive_avg_pool2d(values, size)
    low, high = float(values.min()), float(values.max())
    span = high - low if high > low else 1.0
    levels = ((values - low) * (255.0 / span)).round().nan_to_num().clamp(0, 255).to(torch.uint8)
    channels, height, width = levels.shape
    return Picture(width, height, channels, levels.permute(1, 2, 0).contiguous().numpy().tobytes())


def _most_confident(wrong: list[_Wrong]) -> list[_Wrong]:
    return sorted(wrong, key=lambda w: (-w[0], w[1]))[:_EXAMPLES]


def _first_of(batch: Any) -> torch.Tensor | None:
    """The first input of a batch, if it is a tensor."""
    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    return first if isinstance(first, torch.Tensor) else None


def centroids_of(model: DestinNetwork, step: int) -> Centroids:
    """What the clusters of each layer stand for."""
    layers = []
    for title, images in pictures_of(model):
        count, channels, height, width = images.shape
        if channels not in (1, 3):
            continue  # no picture shows them
        pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
        pictures = [Picture(width, height, channels, pixels[k].tobytes()) for k in range(count)]
        layers.append(LayerPictures(title, pictures))
    return Centroids(step=step, layers=layers)
