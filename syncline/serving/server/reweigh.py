"""`RunExporter`: ONNX files of one run, checkpoint after checkpoint, fast enough to follow it while it trains.

The first export traces the model, which takes seconds. Later ones put the new weights into the same graph. That is
allowed only if each weight of the model stands unchanged in the file; and each file is compared with torch all the
same, so that a wrong one is never served. If either fails, the model is traced again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from syncline.checkpoint import store
from syncline.errors import ExportError
from syncline.serving.exporting.graph import default_outputs, graph_of, metadata_for
from syncline.serving.exporting.onnx_file import export_onnx, runner, save
from syncline.serving.exporting.proof import prove
from syncline.serving.exporting.torch_program import program_runner, save_program
from syncline.serving.server.engine import TORCH_SUFFIX
from syncline.serving.trained import TrainedModel, trained_model
from syncline.telemetry.run_dir import RunDir

__all__ = ["RunExporter"]

_COMPARED = 64
"""Samples that are compared for each new checkpoint; the first is compared as `syncline export` does."""


class RunExporter:
    """`what` is a run directory, or a model whose weights ship with Syncline."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.last_step: int | None = None
        self.note = ""
        self._proto: onnx.ModelProto | None = None
        self._places: dict[str, str] = {}
        """The names of the model's weights, by the names of the graph's."""

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that is complete."""
        found = store.checkpoints_in(RunDir(Path(self._what)).checkpoints)
        return found[-1].step if found else None

    def export(self, folder: Path) -> Path:
        """Write the newest checkpoint as an ONNX file or, if that is not possible, as a torch program."""
        model = trained_model(self._what)
        path = folder / "model.onnx"
        try:
            if self._proto is None or not self._reweigh(model, path):
                export_onnx(model, path, folds=False)  # ONNX Runtime folds them again when it loads the file
                self._remember(model, path)
        except ExportError as error:
            path = self._export_program(model, folder, error)
        self.last_step = int(model.facts["step"]) if "step" in model.facts else None
        return path

    def _export_program(self, model: TrainedModel, folder: Path, reason: ExportError) -> Path:
        path = folder / f"model{TORCH_SUFFIX}"
        names = default_outputs(model)
        try:
            save_program(model, names, metadata_for(model, names, graph_of(model, names)), path)
            prove(model, names, program_runner(path, names), most=_COMPARED)
        except ExportError:
            raise reason from None  # the first reason is the one to fix
        self.note = f"{self._what} is served with torch, which is slower: {reason}"
        return path

    def _remember(self, model: TrainedModel, path: Path) -> None:
        proto = onnx.load(path)
        self._places = places_of(proto, _weights(model))
        is_whole = set(self._places.values()) == set(_weights(model))
        self._proto = proto if is_whole else None

    def _reweigh(self, model: TrainedModel, path: Path) -> bool:
        """Write the graph with new weights; False if it is not equal to the model then."""
        assert self._proto is not None
        weights = _weights(model)
        for tensor in self._proto.graph.initializer:
            if tensor.name in self._places:
                new = weights.get(self._places[tensor.name])
                if new is None or list(new.shape) != list(tensor.dims):
                    return False
                tensor.CopyFrom(onnx.numpy_helper.from_array(new, tensor.name))
        names = [output.name for output in self._proto.graph.output]
        save(self._proto, metadata_for(model, names, graph_of(model, names)), path)
        try:
            prove(model, names, runner(path, names), most=_COMPARED)
        except ExportError:
            return False
        return True


def places_of(proto: onnx.ModelProto, weights: dict[str, np.ndarray]) -> dict[str, str]:
    """Which weight of the model each weight of the graph is: the one with this name and exactly these values."""
    found: dict[str, str] = {}
    for tensor in proto.graph.initializer:
        name = next((name for name in weights if tensor.name == name or tensor.name.endswith(f".{name}")), None)
        if name is not None and _is_same(onnx.numpy_helper.to_array(tensor), weights[name]):
            found[tensor.name] = name
    return found


def _is_same(left: Any, right: np.ndarray) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


def _weights(model: TrainedModel) -> dict[str, np.ndarray]:
    """What training changes; counters of batch normalization play no part in inference."""
    state = model.module.state_dict()
    return {
        name: tensor.numpy() for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not name.endswith("num_batches_tracked")
    }  # fmt: skip
