"""Metrics by name: those of torchmetrics.

torchmetrics takes more than a second to import, so it is imported when the first name is looked up.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

_NOT_OF_TENSORS = ("torchmetrics.text", "torchmetrics.retrieval", "torchmetrics.wrappers", "torchmetrics.aggregation")
"""Folders with metrics of texts, of queries, of other metrics, and of single numbers."""

_SEVERAL_NUMBERS = {
    "ROC", "PrecisionRecallCurve", "ConfusionMatrix", "StatScores", "PrecisionAtFixedRecall", "RecallAtFixedPrecision",
    "SensitivityAtSpecificity", "SpecificityAtSensitivity",
}  # fmt: skip
"""Curves, tables and pairs; a run reports single numbers."""

_NOT_IN_PARTS = {"NormalizedRootMeanSquaredError"}
"""torchmetrics does not merge the states of these correctly."""

_MADE_OF_CODE = {"metric_func", "things"}
"""Arguments that cannot be written in a run file."""


@functools.cache
def table() -> dict[str, Any]:
    import torchmetrics

    found = {name: getattr(torchmetrics, name, None) for name in torchmetrics.__all__}
    return {name: _itself(thing) for name, thing in found.items() if inspect.isclass(thing)}


def listed() -> dict[str, Any]:
    """The metrics that compute one number from outputs and targets."""
    return {name: found for name, found in table().items() if _is_usable(name, found)}


def _itself(metric: Any) -> Any:
    """Some names are deprecated aliases; return the class behind them."""
    return metric.__bases__[0] if (metric.__doc__ or "").startswith("Wrapper for deprecated import") else metric


def _is_usable(name: str, metric: Any) -> bool:
    if metric.__module__.startswith(_NOT_OF_TENSORS) or name in _SEVERAL_NUMBERS | _NOT_IN_PARTS:
        return False
    if _MADE_OF_CODE & set(inspect.signature(metric.__init__).parameters):
        return False
    if "task" in inspect.signature(metric.__new__).parameters:
        return True
    needs = [p for p in inspect.signature(metric.update).parameters.values() if p.default is p.empty and p.kind < 2]
    return [p.name for p in needs[1:]] in (["preds", "target"], ["p", "q"])
