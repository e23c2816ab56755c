"""What is exported: preparation, model and named outputs as one module from tensors to a tuple of tensors.

Here: `ExportGraph`, an example input for tracing, and the dimensions that vary. Not here: the formats (one file each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from syncline.models.answers import LOGITS, PROBABILITIES, Answers
from syncline.models.named_outputs import NamedOutputs
from syncline.serving.metadata import ModelMetadata, TensorFacts
from syncline.serving.samples import Preparation
from syncline.serving.trained import TrainedModel

_TRACED_SAMPLES = 3
"""More than one: from a single sample torch concludes that there is always one."""


class ExportGraph(nn.Module):
    """Inputs as stored to the outputs with these names, in order."""

    def __init__(self, model: nn.Module, preparation: Preparation, answers: Answers, names: Sequence[str]) -> None:
        super().__init__()
        self.preparation = preparation
        self.outputs = NamedOutputs(model, answers, names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        first, *others = inputs
        return tuple(self.outputs(self.preparation(first), *others).values())


def graph_of(model: TrainedModel, names: Sequence[str]) -> ExportGraph:
    return ExportGraph(model.module, model.preparation, model.answers, names).eval()


def example_of(model: TrainedModel) -> tuple[np.ndarray, ...]:
    """A few samples to trace the model with."""
    if model.train is not None:
        count = len(model.train)
        return model.train.raw([k % count for k in range(_TRACED_SAMPLES)])
    return random_inputs(model, _TRACED_SAMPLES)


def random_inputs(model: TrainedModel, count: int) -> tuple[np.ndarray, ...]:
    """Inputs of the right shape and type, for a model without its data."""
    generator = np.random.default_rng(0)
    shape = (count, *model.shape)
    if model.vocabulary is not None:
        return (generator.integers(0, model.vocabulary, shape),)
    if model.preparation.scale is not None:
        return (generator.integers(0, 256, shape, dtype=np.uint8),)
    return (generator.standard_normal(shape, dtype=np.float32),)


def default_outputs(model: TrainedModel) -> list[str]:
    """All that the model returns, and probabilities, unless there are some for every token."""
    inputs = tuple(torch.from_numpy(value) for value in example_of(model))
    with torch.inference_mode():
        prepared = (model.preparation(inputs[0]), *inputs[1:])
        found = NamedOutputs(model.module, model.answers)(*prepared)
    is_per_token = LOGITS in found and found[LOGITS].dim() > 2
    return [name for name in found if not (is_per_token and name == PROBABILITIES)]


def input_names(count: int) -> list[str]:
    return ["input"] if count == 1 else [f"input{k}" for k in range(count)]


def varying_batch(count: int) -> tuple[dict[int, Any], ...]:
    """For `torch.export`: the first dimension of each input is the batch."""
    return ({0: torch.export.Dim("batch")},) * count


def metadata_for(model: TrainedModel, names: Sequence[str], graph: ExportGraph) -> ModelMetadata:
    """What the exported file says about itself, from one forward pass."""
    from syncline import __version__

    example = example_of(model)
    with torch.inference_mode():
        outputs = graph(*(torch.from_numpy(value) for value in example))
    return ModelMetadata(
        name=model.name,
        version=model.version,
        sha256=model.sha256,
        kind=model.kind,
        inputs=tuple(
            TensorFacts(name=name, dtype=str(value.dtype), shape=tuple(value.shape[1:]))
            for name, value in zip(input_names(len(example)), example, strict=True)
        ),
        outputs=tuple(
            TensorFacts(name=name, dtype=str(value.numpy().dtype), shape=tuple(value.shape[1:]))
            for name, value in zip(names, outputs, strict=True)
        ),
        answers=model.answers,
        class_names=model.class_names,
        columns=model.columns,
        scale=model.preparation.scale,
        is_handwriting=model.is_handwriting,
        data=model.data,
        producer=f"syncline {__version__}",
    )
