"""Pretrained weights that ship with Syncline, each with the run file that trained it.

    weights/lenet-mnist.npz    the parameters, as float16 arrays: plain numbers, so loading cannot run code
    weights/lenet-mnist.json   model, options, data, and the metrics of these weights
    weights/lenet-mnist.toml   the run

Here: reading and writing them. `docs/make_weights.py` trains them. torch is imported only to build a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.data.named import DataInfo
from syncline.errors import CheckpointError, UnknownName
from syncline.models.zoo import registry

if TYPE_CHECKING:
    from torch import nn

FOLDER = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class PretrainedWeights:
    """PretrainedWeights on disk, not loaded yet."""

    path: Path
    name: str
    """The name of the model."""
    options: Mapping[str, Any]
    info: DataInfo
    """The training data."""
    metrics: Mapping[str, float]
    """Measured with these weights."""
    sha256: str

    def model(self) -> nn.Module:
        """The model with these weights, in evaluation mode."""
        import numpy as np
        import torch

        data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CheckpointError(f"{self.path} is corrupt: its checksum does not match. Reinstall Syncline.")
        model = registry.build(self.name, self.info.input_shape, self.info.classes or 1, **self.options)
        with np.load(self.path, allow_pickle=False) as arrays:
            model.load_state_dict({key: torch.from_numpy(arrays[key].astype(np.float32)) for key in arrays.files})
        return model.eval()


def names() -> list[str]:
    """The models with pretrained weights, sorted."""
    return sorted({weights.name for weights in _all()})


def find(name: str) -> PretrainedWeights:
    """The weights of the model called `name`, or of a name such as `lenet-mnist`."""
    everything = _all()
    for weights in everything:
        if name in (weights.name, weights.path.stem):
            return weights
    more = "Train the model, and pass the run directory instead of its name."
    raise UnknownName.among("pretrained model", name, [weights.name for weights in everything], more=more)


def save(
    path: Path, name: str, options: Mapping[str, Any], info: DataInfo, model: nn.Module, metrics: Mapping[str, float]
) -> None:
    """Write the parameters of `model` to `path` (an .npz file) as float16, with a description next to it."""
    import numpy as np

    np.savez_compressed(path, **{k: v.detach().numpy().astype(np.float16) for k, v in model.state_dict().items()})
    about = {
        "model": name,
        "options": dict(options),
        "data": info.name,
        "train_samples": info.train_samples,
        "test_samples": info.test_samples,
        "input_shape": info.input_shape,
        "classes": info.classes,
        "scale": info.scale,
        "class_names": info.class_names,
        "metrics": dict(metrics),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


def _all() -> list[PretrainedWeights]:
    return [_read(path) for path in sorted(FOLDER.glob("*.json"))]


def _read(path: Path) -> PretrainedWeights:
    about = json.loads(path.read_text())
    info = DataInfo(
        name=about["data"],
        train_samples=about["train_samples"],
        test_samples=about["test_samples"],
        input_shape=tuple(about["input_shape"]),
        classes=about["classes"],
        scale=tuple(about["scale"]) if about["scale"] else None,
        class_names=tuple(about["class_names"]) if about["class_names"] else None,
    )
    weights = path.with_suffix(".npz")
    return PretrainedWeights(weights, about["model"], about["options"], info, about["metrics"], about["sha256"])
