"""`BinaryPlan`: what the JSON of a binary request means for one model version, so that equal JSON is read once.

A client that sends binary tensors sends the same JSON with each request of the same shape; only the bytes behind it
differ. A plan is made of a request that was read and checked in full. Not here: reading it (`messages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["BinaryPlan", "BinaryPlans"]

_MOST = 64
_MOST_JSON_BYTES = 2048


@dataclass(slots=True)
class BinaryPlan:
    """The tensors behind the JSON, and the JSON of the responses."""

    inputs: tuple[tuple[str, np.dtype[Any], int, tuple[int, ...], int], ...]
    """Name, type, number of values, shape, and place behind the JSON of each input."""
    binary_bytes: int
    outputs: tuple[tuple[str, bool], ...]
    """As in `InferRequest`; all of them are binary."""
    _heads: dict[tuple[tuple[int, ...], ...], bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray], outputs: tuple[tuple[str, bool], ...]) -> BinaryPlan | None:
        """The plan of a request with these tensors in this order; None if their values have to be looked at."""
        inputs, place = [], 0
        for name, array in tensors.items():
            if array.dtype.kind not in "uif" or not all(is_binary for _, is_binary in outputs):
                return None
            inputs.append((name, array.dtype, array.size, array.shape, place))
            place += array.nbytes
        return cls(tuple(inputs), place, outputs)

    def tensors(self, body: bytes, start: int) -> dict[str, np.ndarray]:
        """The inputs in a body whose JSON ends at `start`; they share its memory."""
        return {
            name: np.frombuffer(body, dtype, count, start + place).reshape(shape)
            for name, dtype, count, shape, place in self.inputs
        }

    def head_for(self, arrays: Sequence[np.ndarray]) -> bytes | None:
        """The JSON of an earlier response with the shapes of these outputs."""
        return self._heads.get(tuple([array.shape for array in arrays]))

    def remember_head(self, arrays: Sequence[np.ndarray], head: bytes) -> None:
        """The size of strings, which the JSON states, does not follow from their shape: these are not remembered."""
        if len(self._heads) < _MOST and all(array.dtype != object for array in arrays):
            self._heads[tuple([array.shape for array in arrays])] = head


class BinaryPlans:
    """The plans of one model version, by the JSON of the request."""

    def __init__(self) -> None:
        self._plans: dict[bytes, BinaryPlan] = {}

    def find(self, body: bytes, json_size: int) -> BinaryPlan | None:
        """The plan of this request, if its JSON is known and its size is right."""
        plan = self._plans.get(body[:json_size])
        return plan if plan is not None and len(body) == json_size + plan.binary_bytes else None

    def remember(self, body: bytes, json_size: int, plan: BinaryPlan) -> None:
        if json_size > _MOST_JSON_BYTES:
            return
        if len(self._plans) >= _MOST:
            self._plans.clear()
        self._plans[body[:json_size]] = plan
