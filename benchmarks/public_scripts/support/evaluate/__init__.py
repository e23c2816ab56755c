"""A small stand-in for evaluate: every metric is the accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class _Accuracy:
    def __init__(self) -> None:
        self._right = self._all = 0

    def add_batch(self, predictions: Iterable[Any], references: Iterable[Any]) -> None:
        for predicted, true in zip(predictions, references, strict=True):
            self._right += int(predicted) == int(true)
            self._all += 1

    def compute(self, predictions: Iterable[Any] = (), references: Iterable[Any] = ()) -> dict[str, float]:
        self.add_batch(predictions, references)
        found = {"accuracy": self._right / self._all}
        self._right = self._all = 0
        return found


def load(*_: Any, **__: Any) -> _Accuracy:
    """The metric, whatever its name."""
    return _Accuracy()
