"""`Registry`: the loaded versions of every model, and which of them answers a request.

A request holds on to the version that it was given to, so that a new catalog never touches it: it ends on the old
version, and the old version is freed with its last request. Not here: loading (`loading.py`), deciding what to serve
(`rollout.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncline.errors import did_you_mean
from syncline.serving.metadata import ModelMetadata
from syncline.serving.server.batching import Batcher
from syncline.serving.server.binary_plan import BinaryPlans
from syncline.serving.server.canary import Canary
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.metrics import ServerMetrics
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.signature import Signature
from syncline.serving.server.tuning import Tuned

__all__ = ["LoadedVersion", "Registry"]


@dataclass(eq=False)
class LoadedVersion:
    """A version that can answer."""

    served: ServedVersion
    tuned: Tuned
    batcher: Batcher
    plans: BinaryPlans = field(default_factory=BinaryPlans)
    is_compared: bool = False
    """Whether its model has a canary or a shadow."""
    signature: Signature = field(init=False)
    metadata: ModelMetadata | None = field(init=False)
    """What Syncline wrote into the file; None for files from elsewhere."""

    def __post_init__(self) -> None:
        self.signature = self.tuned.engine.signature
        self.metadata = self.tuned.engine.metadata

    def as_json(self, versions: list[str]) -> dict[str, Any]:
        """The protocol's metadata of the model."""
        measured = self.tuned
        return {
            "name": self.served.model,
            "versions": versions,
            "platform": measured.engine.platform,
            "inputs": [spec.as_json() for spec in self.signature.inputs],
            "outputs": [spec.as_json() for spec in self.signature.outputs],
            "parameters": {
                "version": self.served.version, "source": self.served.source, "step": self.served.step,
                "threads": measured.threads, "max_batch": measured.max_batch,
                "batch_is_bit_equal": measured.is_bit_equal,
            },
        }  # fmt: skip


@dataclass
class _ServedModel:
    versions: dict[str, LoadedVersion] = field(default_factory=dict)
    stable: LoadedVersion | None = None
    candidate: LoadedVersion | None = None
    """The canary or the shadow."""
    canary: Canary | None = None


class Registry:
    """The models of one process."""

    def __init__(self, metrics: ServerMetrics, on_worse: Callable[[ServedVersion, str], None]) -> None:
        self._models: dict[str, _ServedModel] = {}
        self._metrics, self._on_worse = metrics, on_worse
        self.catalog = Catalog()
        self.is_ready = False

    def loaded(self) -> dict[tuple[str, str], LoadedVersion]:
        return {v.served.key: v for model in self._models.values() for v in model.versions.values()}

    def apply(self, catalog: Catalog, loaded: Mapping[tuple[str, str], LoadedVersion]) -> None:
        """Serve exactly this catalog from now on; `loaded` holds all of its versions."""
        models: dict[str, _ServedModel] = {}
        for served in catalog.versions:
            model = models.setdefault(served.model, _ServedModel())
            version = loaded[served.key]
            version.served = served
            model.versions[served.version] = version
            if served.role == "stable":
                model.stable = version
            elif served.role in ("canary", "shadow"):
                model.candidate = version
        for name, model in models.items():
            for version in model.versions.values():
                version.is_compared = model.candidate is not None
            if model.candidate is not None and model.candidate.served.role == "canary":
                model.canary = self._canary_of(name, model.candidate)
        self._models, self.catalog, self.is_ready = models, catalog, True

    def names(self) -> list[str]:
        return list(self._models)

    def has_stable(self, name: str) -> bool:
        return self._model(name).stable is not None

    def versions_of(self, name: str) -> list[str]:
        return list(self._model(name).versions)

    def pick(self, name: str, version: str | None) -> LoadedVersion:
        """The version that answers the next request."""
        model = self._models.get(name) or self._model(name)
        if version is not None:
            return self.find(name, version)
        if model.canary is not None and model.candidate is not None and model.canary.takes_next():
            return model.candidate
        if model.stable is None:
            raise RequestRefused(f"No version of {name!r} answers by default.", status=404, code="unknown-version")
        return model.stable

    def find(self, name: str, version: str | None) -> LoadedVersion:
        """A version by its number, or the stable one."""
        model = self._model(name)
        found = model.stable if version is None else model.versions.get(version)
        if found is None:
            known = ", ".join(model.versions)
            raise RequestRefused(
                f"Model {name!r} has no version {version!r}. It has: {known}.",
                status=404, code="unknown-version", model=name, version=version, known=list(model.versions),
            )  # fmt: skip
        return found

    def answered(self, version: LoadedVersion, seconds: float, *, is_error: bool) -> None:
        """Count an answer; ask for the end of a canary that does worse."""
        served = version.served
        self._metrics.answered(served.model, served.version, seconds, is_error=is_error)
        model = self._models.get(served.model)
        if model is None or model.canary is None or version not in (model.stable, model.candidate):
            return
        reason = model.canary.observe(seconds, is_canary=version is model.candidate, is_error=is_error)
        self._end_if_worse(model, reason)

    def labeled(self, version: LoadedVersion, outcomes: Sequence[bool]) -> None:
        """Count which predictions of a version were right; ask for the end of a canary that does worse."""
        served = version.served
        self._metrics.labeled(served.model, served.version, outcomes)
        model = self._models.get(served.model)
        if model is not None and model.canary is not None and version in (model.stable, model.candidate):
            reason = model.canary.observe_labels(outcomes, is_canary=version is model.candidate)
            self._end_if_worse(model, reason)

    def _end_if_worse(self, model: _ServedModel, reason: str | None) -> None:
        if reason is not None and model.candidate is not None:
            model.canary = None  # from now on, in this process, the stable version answers
            self._on_worse(model.candidate.served, reason)

    def is_watched(self, version: LoadedVersion) -> bool:
        """Whether its outputs are checked, because a canary is compared."""
        model = self._models.get(version.served.model)
        return model is not None and model.canary is not None

    def shadow_of(self, version: LoadedVersion) -> LoadedVersion | None:
        """The version that gets a copy of what this one is asked."""
        model = self._models.get(version.served.model)
        if model is None or version is not model.stable or model.candidate is None:
            return None
        return model.candidate if model.candidate.served.role == "shadow" else None

    def compare(self, version: LoadedVersion, given: Any, shadow: Any) -> None:
        """Count whether the answer of a shadow agrees with the one that was given."""
        if isinstance(shadow, BaseException):
            result = "error"
        elif isinstance(given, BaseException):
            return
        else:
            result = "agree" if _agree(given, shadow) else "differ"
        self._metrics.count("syncline_shadow_total", model=version.served.model, result=result)

    def in_flight_per_version(self) -> dict[tuple[str, str], int]:
        return {key: len(version.batcher) for key, version in self.loaded().items()}

    def _canary_of(self, name: str, candidate: LoadedVersion) -> Canary:
        """The running comparison, unless this is another canary."""
        before = self._models.get(name)
        if before is not None and before.candidate is candidate and before.canary is not None:
            return before.canary
        return Canary(candidate.served.share)

    def _model(self, name: str) -> _ServedModel:
        model = self._models.get(name)
        if model is None:
            raise RequestRefused(
                f"There is no model {name!r}. {did_you_mean(name, self._models)}".rstrip(),
                status=404, code="unknown-model", model=name, known=list(self._models),
            )  # fmt: skip
        return model


def _agree(given: Mapping[str, np.ndarray], shadow: Mapping[str, np.ndarray]) -> bool:
    """Equal classes where the last dimension holds scores, else values that are close."""
    for name, array in given.items():
        other = shadow.get(name)
        if other is None or other.shape != array.shape or array.dtype.kind != other.dtype.kind:
            return False
        if array.dtype.kind == "f" and array.ndim > 1 and array.shape[-1] > 1:
            if not np.array_equal(array.argmax(-1), other.argmax(-1)):
                return False
        elif array.dtype.kind == "f":
            if not np.allclose(array, other, rtol=1e-2, atol=1e-4, equal_nan=True):
                return False
        elif not np.array_equal(array, other):
            return False
    return True
