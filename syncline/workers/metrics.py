"""Metrics by their torchmetrics names, computed batch by batch and merged in the order of the batches.

Here: building them and merging their states. Not here: which batch is evaluated on which worker (`evaluate.py`).
Merging in batch order, whichever worker computed a batch, gives bit-identical results for any number of workers.

torchmetrics takes more than a second to import, in every worker. So it is imported only when the first evaluation needs
it, and the most common metric, classification accuracy, is computed here without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from syncline.config.spec import Spec
from syncline.errors import ConfigError
from syncline.models.catalog import metrics
from syncline.models.catalog.lookup import find

if TYPE_CHECKING:
    from torchmetrics import Metric

State = dict[str, Any]


class MetricSet:
    """The metrics of a task, built when the first output shows the number of classes."""

    def __init__(self, wanted: Sequence[Spec | Any]) -> None:
        self._wanted = wanted
        self._metrics: dict[str, Metric | PlainAccuracy] | None = None

    def states(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, State]:
        """Each metric's state after this one batch."""
        if self._metrics is None:
            self._metrics = {_name(w): _make(w, output) for w in self._wanted}
        states: dict[str, State] = {}
        for name, metric in self._metrics.items():
            metric.reset()
            metric.update(output, target)
            # Copied: resetting the metric for the next batch empties its lists.
            held = {key: getattr(metric, key) for key in metric._reductions}
            states[name] = {key: list(value) if isinstance(value, list) else value for key, value in held.items()}
        return states

    def compute(self, states: Sequence[dict[str, State]]) -> dict[str, float]:
        """The metrics over all batches, from their states in batch order."""
        results: dict[str, float] = {}
        for name, metric in (self._metrics or {}).items():
            metric.reset()
            for key, reduction in metric._reductions.items():
                setattr(metric, key, _merge([s[name][key] for s in states], reduction, name))
            metric._update_count = len(states)  # or torchmetrics warns that compute was called before update
            try:
                value = metric.compute()
            except (IndexError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"The metric {name} cannot be computed from this data: {error}", code="metric", metric=name
                ) from error
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ConfigError(
                    f"The metric {name} is not a single number. Choose one that is, or set its average option.",
                    code="metric-shape",
                    metric=name,
                )
            results[name] = float(value)
        return results


class PlainAccuracy:
    """The same as `torchmetrics.Accuracy(task="multiclass", average="micro")`."""

    _update_count = 0

    def __init__(self) -> None:
        self._reductions = {"correct": dim_zero_sum, "total": dim_zero_sum}
        self.reset()

    def reset(self) -> None:
        self.correct, self.total = torch.tensor(0), torch.tensor(0)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count a batch: classes along dimension 1 of `output`, class numbers in `target`."""
        self.correct = (output.argmax(1) == target).sum()
        self.total = torch.tensor(target.numel())

    def compute(self) -> torch.Tensor:
        return self.correct / self.total


def dim_zero_sum(values: torch.Tensor) -> torch.Tensor:
    """Marks a state that is summed, by the name of torchmetrics' own function."""
    return values.sum(0)


def _merge(values: list[Any], reduction: Any, name: str) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    kind = getattr(reduction, "__name__", "")
    merged = values[0].clone()
    for value in values[1:]:
        if kind == "dim_zero_sum":
            merged += value
        elif kind == "dim_zero_max":
            merged = torch.maximum(merged, value)
        elif kind == "dim_zero_min":
            merged = torch.minimum(merged, value)
        elif kind == "dim_zero_cat":
            merged = torch.cat([merged.reshape(-1, *merged.shape[1:]), value.reshape(-1, *value.shape[1:])])
        else:
            return _merged_by_metric(values, reduction, name)
    return merged


def _merged_by_metric(values: list[Any], reduction: Any, name: str) -> Any:
    """Merge as torchmetrics does across processes: stack the states and apply the metric's reduction."""
    stacked = torch.stack(values)
    if reduction is None:
        return stacked  # the metric merges them in `compute`
    if not callable(reduction):
        raise ConfigError(
            f"The metric {name} cannot be computed in parts. Compute it from the trained model instead.",
            code="metric-parts",
            metric=name,
        )
    return reduction(stacked)


def _make(wanted: Spec | Any, output: torch.Tensor) -> Metric | PlainAccuracy:
    if isinstance(wanted, Spec) and wanted.name.lower() == "accuracy" and not wanted.options and _has_classes(output):
        return PlainAccuracy()
    import torchmetrics

    if isinstance(wanted, torchmetrics.Metric):
        return wanted
    if not isinstance(wanted, Spec):
        made = wanted()
        if not isinstance(made, torchmetrics.Metric):
            raise ConfigError(f"A metric's function returned a {type(made).__name__}, not a torchmetrics.Metric.")
        return made
    found = find("metric", wanted.name, metrics.table())
    options = dict(wanted.options)
    if _needs_classes(found) and _has_classes(output):
        options.setdefault("num_classes", output.shape[1])
    if "task" in inspect.signature(found.__new__).parameters and "task" not in options:
        many = _has_classes(output)
        options["task"] = "multiclass" if many else "binary"
        if many:
            options.setdefault("num_classes", output.shape[1])
    try:
        metric: Metric = found(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The metric {wanted} cannot be built: {error}") from error
    return metric


def _needs_classes(metric: Any) -> bool:
    parameter = inspect.signature(metric.__init__).parameters.get("num_classes")
    return parameter is not None and parameter.default is parameter.empty


def _has_classes(output: torch.Tensor) -> bool:
    return output.dim() >= 2 and output.shape[1] > 1


def _name(wanted: Spec | Any) -> str:
    return wanted.name if isinstance(wanted, Spec) else type(wanted).__name__
