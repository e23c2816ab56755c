"""Export of the weights alone, as safetensors: tensors by name, which other programs read without running code."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from syncline.models.named_outputs import NamedOutputs
from syncline.serving.exporting.proof import Run
from syncline.serving.metadata import KEY, ModelMetadata
from syncline.serving.trained import TrainedModel


def save_weights(model: TrainedModel, metadata: ModelMetadata, path: Path) -> None:
    """Write all parameters and buffers; a tensor under two names is written twice."""
    from safetensors.torch import save_file

    tensors = {name: tensor for name, tensor in model.module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, path, metadata={KEY: metadata.to_json(), "format": "pt"})


def weights_runner(model: TrainedModel, names: Sequence[str], path: Path) -> Run:
    """A function that runs the model's code with the weights in the file."""
    from safetensors.torch import load_file

    module = copy.deepcopy(model.module)
    module.load_state_dict(load_file(path))
    loaded = NamedOutputs(module.eval(), model.answers, names)

    def run(values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        first, *others = (torch.from_numpy(value) for value in values)
        with torch.inference_mode():
            found = loaded(model.preparation(first), *others)
        return {name: value.numpy() for name, value in found.items()}

    return run
