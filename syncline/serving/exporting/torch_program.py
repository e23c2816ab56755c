"""Export with `torch.export`: a program of torch operators with its weights, for torch without the model's code.

Here: writing it, and running it for the proof. Not here: ONNX (`onnx_file.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from syncline.serving.exporting.failures import explain
from syncline.serving.exporting.graph import example_of, graph_of, varying_batch
from syncline.serving.exporting.proof import Run
from syncline.serving.exporting.quiet import quiet
from syncline.serving.metadata import KEY, ModelMetadata
from syncline.serving.trained import TrainedModel


def save_program(model: TrainedModel, names: Sequence[str], metadata: ModelMetadata, path: Path) -> None:
    """Write the program with its metadata, which `torch.export.load(path, extra_files={"syncline": ""})` returns."""
    inputs = tuple(torch.from_numpy(value) for value in example_of(model))
    try:
        with quiet():
            program = torch.export.export(
                graph_of(model, names), inputs, dynamic_shapes=(varying_batch(len(inputs)),), strict=False
            )
    except Exception as error:  # the model itself raises what it likes
        raise explain(error, "torch") from error
    with path.open("wb") as file, quiet():
        torch.export.save(program, file, extra_files={KEY: metadata.to_json()})


def program_runner(path: Path, names: Sequence[str]) -> Run:
    """A function that runs the program in a file."""
    with path.open("rb") as file, quiet():
        module = torch.export.load(file).module()

    def run(values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(value) for value in values))
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}

    return run
