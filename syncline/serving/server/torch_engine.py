"""An engine for runs that have no equivalent in ONNX: a torch program, which the exporter made.

It is slower than ONNX Runtime, and a replaced process needs seconds to import torch; so it is used only where there is
no ONNX file, and the server says so. Files of others are never loaded here. Not here: ONNX (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from syncline.serving.exporting.quiet import quiet
from syncline.serving.metadata import KEY, ModelMetadata, TensorFacts
from syncline.serving.server.datatypes import datatype_of
from syncline.serving.server.signature import Signature, TensorSpec

__all__ = ["TorchEngine"]


class TorchEngine:
    """A program of `torch.export`, on one thread: further ones would be shared by all models of the process."""

    platform = "pytorch_export"
    shares_batch_dimension = True

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        written = {KEY: ""}
        with path.open("rb") as file, quiet():
            self._program = torch.export.load(file, extra_files=written).module()
        metadata = msgspec.json.decode(written[KEY], type=ModelMetadata)
        self.metadata: ModelMetadata | None = metadata
        self.signature = Signature(tuple(map(_spec, metadata.inputs)), tuple(map(_spec, metadata.outputs)))

    def run(self, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        # torch refuses memory that it may not write to, such as that of a request; a copy is cheap beside the model.
        given = [torch.from_numpy(np.array(tensors[spec.name])) for spec in self.signature.inputs]
        with torch.inference_mode():
            return [output.numpy() for output in self._program(*given)]


def _spec(facts: TensorFacts) -> TensorSpec:
    return TensorSpec(facts.name, datatype_of(np.dtype(facts.dtype)), (-1, *facts.shape))
