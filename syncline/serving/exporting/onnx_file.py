"""Export to ONNX, with a batch of any size.

Here: `export_onnx`, and running an ONNX file. Not here: int8 (`quantize.py`), and the proof (`proof.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.config.owned_files import temporary_name
from syncline.errors import ExportError
from syncline.serving.exporting.failures import explain, fixed_batch
from syncline.serving.exporting.graph import (
    ExportGraph,
    default_outputs,
    example_of,
    graph_of,
    input_names,
    metadata_for,
    varying_batch,
)
from syncline.serving.exporting.proof import MOST_SAMPLES, Proof, Run, prove
from syncline.serving.exporting.quiet import quiet
from syncline.serving.metadata import KEY, ModelMetadata, open_session, require
from syncline.serving.trained import TrainedModel, trained_model

if TYPE_CHECKING:
    import onnx

__all__ = ["ExportedModel", "export_onnx", "runner"]

_MOST_BYTES = 2_000_000_000
"""An ONNX file is one Protocol Buffers message, which ends at 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """An exported file, and the proof that it is equal to the run's model."""

    path: Path
    metadata: ModelMetadata
    proof: Proof
    seconds: float
    """How long the export and the proof took."""
    int8: dict[str, float] | None = None
    """Sizes in bytes, times of one answer in milliseconds and the drop in points, against float32."""

    @property
    def cards(self) -> tuple[Path, Path]:
        """The model card as Markdown and as JSON."""
        markdown, data = (self.path.with_name(f"{self.path.name}.card.{suffix}") for suffix in ("md", "json"))
        return markdown, data

    @property
    def size_bytes(self) -> int:
        if self.path.is_dir():
            return sum(file.stat().st_size for file in self.path.iterdir())
        return self.path.stat().st_size


def export_onnx(
    model: TrainedModel | str | Path,
    path: str | Path,
    *,
    outputs: Sequence[str] | None = None,
    checkpoint: int | None = None,
    most_samples: int = MOST_SAMPLES,
    folds: bool = True,
) -> ExportedModel:
    """Write an ONNX file and prove it equal; at `path` is the whole file or none.

    `model` is a run directory, a model whose weights ship with Syncline, or a `TrainedModel`. `outputs` are names of
    outputs or layers. The proof compares at most `most_samples` samples of the run's test data. Without `folds` each
    weight stands in the file as in the model; with it, some are computed in advance.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "Export to ONNX")
    start = time.perf_counter()
    trained = model if isinstance(model, TrainedModel) else trained_model(model, checkpoint=checkpoint)
    names = list(outputs) if outputs is not None else default_outputs(trained)
    graph = graph_of(trained, names)
    metadata = metadata_for(trained, names, graph)
    proto = _traced(graph, example_of(trained), names, folds)
    with unfinished(Path(path)) as temporary:
        save(proto, metadata, temporary)
        proof = prove(trained, names, runner(temporary, names), most=most_samples)
    return ExportedModel(path=Path(path), metadata=metadata, proof=proof, seconds=time.perf_counter() - start)


def runner(path: Path, names: Sequence[str], *, threads: int = 0) -> Run:
    """A function that runs an ONNX file."""
    session = open_session(path, threads=threads)
    inputs = [one.name for one in session.get_inputs()]

    def run(values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        found = session.run(list(names), dict(zip(inputs, values, strict=True)))
        return dict(zip(names, found, strict=True))

    return run


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place at the end; if anything fails, nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(proto: onnx.ModelProto, metadata: ModelMetadata, path: Path) -> None:
    """Write the file with its metadata."""
    import onnx

    del proto.metadata_props[:]
    proto.metadata_props.add(key=KEY, value=metadata.to_json())
    proto.producer_name, proto.producer_version = "syncline", metadata.producer.removeprefix("syncline ")
    del proto.graph.value_info[:]  # torch's shapes contradict those that quantization infers
    onnx.save(proto, path)


def _traced(graph: ExportGraph, example: tuple[np.ndarray, ...], names: Sequence[str], folds: bool) -> Any:
    size = sum(tensor.nbytes for tensor in graph.state_dict().values() if isinstance(tensor, torch.Tensor))
    if size > _MOST_BYTES:
        raise ExportError(
            f"The weights take {size / 1e9:.1f} GB, and an ONNX file holds at most 2 GB. Use --format torch.",
            code="too-large", size_bytes=size, most_bytes=_MOST_BYTES,
        )  # fmt: skip
    inputs = tuple(torch.from_numpy(value) for value in example)
    try:
        with quiet():
            program = torch.onnx.export(
                graph, inputs, dynamo=True, dynamic_shapes=(varying_batch(len(inputs)),), verbose=False,
                input_names=input_names(len(inputs)), output_names=list(names), optimize=folds,
            )  # fmt: skip
    except Exception as error:  # torch, onnxscript and the model itself raise what they like
        raise explain(error, "onnx") from error
    assert program is not None
    proto = program.model_proto
    # The exporter tries again with the batch as a constant where it cannot vary, instead of failing.
    if not all(one.type.tensor_type.shape.dim[0].dim_param for one in proto.graph.input):
        raise fixed_batch("onnx")
    return proto
