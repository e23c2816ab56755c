"""DeSTIN in Python: `syncline.Destin(...).fit(data)` trains a hierarchy of nodes, whose beliefs are features.

Here: `Destin`, the options, and `Beliefs`, a trained network. Training is a run like any other, of the model `destin`;
not here: the network (`models/destin/`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.config.spec import Spec
from syncline.driver import train
from syncline.errors import ConfigError, DataError
from syncline.telemetry.run_dir import RunDir

if TYPE_CHECKING:
    import torch

    from syncline.data.source import Source
    from syncline.data.stored_features import StoredFeatures
    from syncline.models.destin.network import DestinNetwork

__all__ = ["Beliefs", "Destin"]


@dataclass(frozen=True, kw_only=True)
class Destin:
    """A hierarchy of nodes that learn clusters and report beliefs (Arel, Rose & Coop, 2009).

    >>> beliefs = syncline.Destin(grid=(8, 4, 2, 1), centroids=25).fit("mnist", workers=2)    # doctest: +SKIP
    >>> syncline.train(model="mlp", data=beliefs.features("mnist"), workers=2)                # doctest: +SKIP

    Attributes:
        grid: The nodes in a row of each layer; each number divides the one before.
        centroids: The clusters of each node, one number or one per layer.
        shared: Whether the nodes of a layer share their clusters.
        training: "greedy", layer by layer, or "concurrent".
        memory: What a node knows of the view before: "none", the "table" of transitions under the parent's advice, or,
            "recurrent", its own belief and its parent's as part of what it observes.
        movements: How many views of each image there are, each moved by a pixel.
        sharpness: How much more of the belief nearer clusters get.
    """

    grid: Sequence[int] = (8, 4, 2, 1)
    centroids: int | Sequence[int] = 25
    shared: bool = True
    training: str = "greedy"
    memory: str = "none"
    movements: int = 4
    sharpness: float = 4.0

    @property
    def model(self) -> Spec:
        """The model for `syncline.train`."""
        centroids = self.centroids if isinstance(self.centroids, int) else tuple(self.centroids)
        return Spec("destin", {**vars(self), "grid": tuple(self.grid), "centroids": centroids})

    def fit(self, data: Any, *, workers: int = 2, **settings: Any) -> Beliefs:
        """Train on `data` without labels; `settings` are those of `syncline.train`."""
        return Beliefs(train(model=self.model, data=data, workers=workers, **settings).run_dir)


@dataclass(frozen=True)
class Beliefs:
    """The trained network of a run, also of one that the command line has started."""

    run_dir: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_dir", Path(self.run_dir))

    @cached_property
    def network(self) -> DestinNetwork:
        """The module, in evaluation mode."""
        from syncline.models.destin.network import DestinNetwork
        from syncline.serving.trained import trained_model

        found = trained_model(self.run_dir).module
        if not isinstance(found, DestinNetwork):
            raise ConfigError(
                f"{self.run_dir} is the run of a {type(found).__name__}, which has no beliefs. Pass the folder of a "
                "run of the model 'destin'.",
                code="not-destin",
                run_dir=str(self.run_dir),
            )
        return found

    def __call__(self, images: Any) -> torch.Tensor:
        """The beliefs of all nodes, lowest layer first, for images as the network was trained on: [samples, features].

        Images of a data set with a name must be scaled as that is.
        """
        import torch

        return self.network.beliefs(torch.as_tensor(images))

    def centroids(self, layer: int) -> torch.Tensor:
        """The means of a layer's clusters: [nodes, or 1 if they share them; clusters; numbers that a node sees]."""
        return self.network.layers[layer].means.clone()  # type: ignore[operator]  # a Layer

    def features(self, data: Any, *, test: Any = None, data_dir: str | Path | None = None) -> StoredFeatures:
        """The beliefs for each sample of labeled `data`, as training data for any model; named data has its test part.

        They are computed once and kept in a file in the run's folder.
        """
        from syncline.task import Task
        from syncline.workers.build import build_sources

        task = Task(model="linear", data=data, test=test).located(Path(data_dir) if data_dir else None, None)
        train_part, test_part = build_sources(task)
        name = hashlib.sha256(f"{task.facts().data_fingerprint}".encode()).hexdigest()[:12]
        return self._stored(train_part, test_part, name)

    def _stored(self, train_part: Source, test_part: Source | None, name: str) -> StoredFeatures:
        from syncline.data import stored_features
        from syncline.data.stored_features import StoredFeatures

        folder = RunDir.owned(self.run_dir).path / "features"
        path, targets = folder / f"{name}.npy", _targets(train_part)
        mean, deviation = stored_features.computed(path, self._inputs(train_part), len(train_part), self)
        own_test = None
        if test_part is not None and len(test_part):
            test_path = folder / f"{name}-test.npy"
            stored_features.computed(test_path, self._inputs(test_part), len(test_part), self)
            own_test = StoredFeatures(test_path, _targets(test_part), mean, deviation)
        return StoredFeatures(path, targets, mean, deviation, own_test)

    def _inputs(self, source: Source) -> Any:
        import numpy as np

        expected = self.network.geometry.shape

        def fetch(low: int, high: int) -> torch.Tensor:
            inputs: torch.Tensor = source.fetch(np.arange(low, high))[0]
            if tuple(inputs.shape[1:]) != tuple(expected):
                raise DataError(
                    f"The samples have shape {tuple(inputs.shape[1:])}, but the network of {self.run_dir} was trained "
                    f"on images of shape {tuple(expected)}. Resize them, or train a network on images like these.",
                    code="another-shape",
                    shape=tuple(inputs.shape[1:]),
                    expected=tuple(expected),
                )
            return inputs

        return fetch


def _targets(source: Source) -> torch.Tensor:
    """All targets, which a classifier of features needs."""
    import numpy as np
    import torch

    from syncline.data.source import ArraySource

    if isinstance(source, ArraySource) and len(source.tensors) == 2:
        return source.tensors[1]
    at_once = 1000
    first = source.fetch([0])
    if not isinstance(first, (tuple, list)) or len(first) != 2:
        raise DataError(
            "Features are training data for another model, so each sample needs a target: pass (images, targets). For "
            "the beliefs alone, call the object itself: beliefs(images).",
            code="no-targets",
        )
    parts = [source.fetch(np.arange(low, min(low + at_once, len(source))))[1] for low in range(0, len(source), at_once)]
    return torch.cat([torch.as_tensor(part) for part in parts])
