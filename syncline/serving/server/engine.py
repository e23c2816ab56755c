"""Engines: what computes a model's outputs. ONNX Runtime by default, torch where a model has no ONNX file.

Here: the protocol `InferenceEngine`, and loading. Not here: which requests run together (`batching.py`), and how many
threads an engine gets (`tuning.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syncline.errors import ConfigError
from syncline.serving.metadata import KEY, ModelMetadata, metadata_of, open_session
from syncline.serving.server.datatypes import DTYPES
from syncline.serving.server.signature import Signature, TensorSpec

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["TORCH_SUFFIX", "InferenceEngine", "OnnxEngine", "load_engine"]

TORCH_SUFFIX = ".pt2"

_ONNX_TYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip


class InferenceEngine(Protocol):
    """Computes outputs. `run` may be called from any thread, but by one at a time."""

    signature: Signature
    platform: str
    metadata: ModelMetadata | None
    """What Syncline wrote into the file; None for files from elsewhere."""
    shares_batch_dimension: bool
    """Whether the first dimension of all inputs and outputs is the batch, of any size."""

    def run(self, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs, in the order of the signature."""


class OnnxEngine:
    """An ONNX Runtime session."""

    platform = "onnxruntime_onnx"

    def __init__(self, session: onnxruntime.InferenceSession, source: str) -> None:
        self._session = session
        inputs, outputs = session.get_inputs(), session.get_outputs()
        self.signature = Signature(_specs(inputs, source), _specs(outputs, source))
        has_metadata = KEY in session.get_modelmeta().custom_metadata_map
        self.metadata = metadata_of(session, source) if has_metadata else None
        first = {(tensor.shape or [0])[0] for tensor in [*inputs, *outputs]}
        # An unnamed dimension is None in each tensor, and may be a different size in each.
        self.shares_batch_dimension = len(first) == 1 and all(isinstance(size, str) for size in first)
        self._names = list(self.signature.output_names)

    def run(self, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray] = self._session.run(self._names, tensors)
        return found


def load_engine(path: Path, threads: int) -> InferenceEngine:
    """The model in a file; `ExportError` if it cannot be loaded."""
    if path.suffix == TORCH_SUFFIX:
        from syncline.serving.server.torch_engine import TorchEngine

        return TorchEngine(path)
    return OnnxEngine(open_session(path, threads=threads), str(path))


def _specs(tensors: Sequence[Any], source: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, _datatype(t, source), _shape(t.shape)) for t in tensors)


def _shape(shape: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def _datatype(tensor: Any, source: str) -> str:
    found = _ONNX_TYPES.get(tensor.type)
    if found is None:
        raise ConfigError(
            f"{source} has a tensor {tensor.name!r} of the type {tensor.type}, which the protocol cannot carry over "
            f"JSON or NumPy. Served types: {', '.join(DTYPES)}.",
            code="unservable-type", source=source, tensor=tensor.name, type=tensor.type,
        )  # fmt: skip
    return found
