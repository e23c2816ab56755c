"""Samples as an exported model takes them, beside the same samples as the torch model takes them.

Here: `Preparation`, the scaling and the transforms between the two as a module that can be exported, and `RawSamples`.
Not here: the data itself (`data/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from syncline.data.augmented import AugmentedSource
from syncline.data.files.source import FileSource
from syncline.data.source import ArraySource, Indices, Source, WrappedSource
from syncline.data.transforms import Transform
from syncline.errors import ExportError


class Preparation(nn.Module):
    """From an input as stored to the one that the model was trained on."""

    def __init__(self, scale: tuple[float, float] | None, transforms: Sequence[Transform]) -> None:
        super().__init__()
        self.scale, self._transforms = scale, tuple(transforms)

    def forward(self, inputs: Tensor) -> Tensor:
        """The same operations in the same order as `ArraySource` and `AugmentedSource`, for the same bits."""
        if self.scale is not None:
            mean, deviation = self.scale
            inputs = inputs.float().mul(1.0 / (255.0 * deviation)).sub(mean / deviation)
        for transform in self._transforms:
            inputs = transform(inputs, _draws_nothing)
        return inputs


class RawSamples:
    """A source's samples: as stored, and as the model gets them."""

    def __init__(self, source: Source) -> None:
        self._source, self._base = source, _base_of(source)

    def __len__(self) -> int:
        return len(self._source)

    def raw(self, indices: Indices) -> tuple[np.ndarray, ...]:
        """The inputs as stored, for an exported model."""
        wanted = np.asarray(indices, np.int64)
        if scale_of(self._base) is None:
            return tuple(tensor.numpy() for tensor in _inputs(self._base.fetch(wanted)))
        if isinstance(self._base, ArraySource):
            return (self._base.tensors[0][torch.from_numpy(wanted)].numpy(),)
        assert isinstance(self._base, FileSource)
        return (self._base.raw(wanted)[0],)

    def prepared(self, indices: Indices) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The inputs for the torch model, and the target."""
        batch = self._source.fetch(np.asarray(indices, np.int64))
        if isinstance(batch, Tensor) or len(batch) == 1:
            (inputs,) = (batch,) if isinstance(batch, Tensor) else batch
            return (inputs,), inputs
        return _inputs(batch), batch[-1] if isinstance(batch[-1], Tensor) else None


def scale_of(source: Source) -> tuple[float, float] | None:
    """The (mean, std) that a source applies to bytes; None if its inputs are floats or tokens already."""
    base = _base_of(source)
    if isinstance(base, ArraySource):
        return base.scale
    return base.scale if isinstance(base, FileSource) else None


def _base_of(source: Source) -> Source:
    """Without transforms, and with targets."""
    while isinstance(source, (AugmentedSource, WrappedSource)):
        source = source.base
    return source


def _inputs(batch: Any) -> tuple[Tensor, ...]:
    inputs = (batch,) if isinstance(batch, Tensor) else tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
    for value in inputs:
        if not isinstance(value, Tensor):
            raise ExportError(
                f"The inputs of this data are of type {type(value).__name__}, but an exported model takes tensors.",
                code="inputs-not-tensors", type=type(value).__name__,
            )  # fmt: skip
    return inputs


def _draws_nothing(_which: int) -> np.ndarray:
    raise AssertionError("A deterministic transform draws no random numbers.")
