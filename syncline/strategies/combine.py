"""Combining a flat tensor over all workers, encoded as the strategy says.

Here: `Combiner`: the weighted sum over workers through a codec, with error feedback where the codec loses something.
Exact sums go through the collective's own sum; encoded ones are gathered and added up in rank order, so that every
worker ends up with the same bits. Not here: what is summed and when (the exchanges), PowerSGD (`power.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from syncline.algorithms.codecs import Codec, ErrorFeedback
from syncline.comms.collective import Collective
from syncline.strategies.how import Exact, How, PowerSGD
from syncline.strategies.power import PowerCombiner

__all__ = ["Combiner", "CodecCombiner", "make_combiner"]


class Combiner(Protocol):
    """The weighted sum over all workers of tensors of one kind, exchange after exchange."""

    def sum_(self, flat: torch.Tensor, weight: float) -> None:
        """Replace `flat` by the sum over all workers of `weight * flat`, as far as the encoding lets through."""

    def state(self) -> dict[str, Any]:
        """What was not let through yet, for a checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        """Take up a `state`."""


def make_combiner(how: How, collective: Collective, shapes: Sequence[Sequence[int]], seed: int) -> Combiner:
    """The combiner for flat tensors that are made of parameters of these `shapes`."""
    if isinstance(how, PowerSGD):
        return PowerCombiner(how.rank, shapes, collective, seed)
    return CodecCombiner(how, collective)


class CodecCombiner:
    """A `Combiner` for encodings that make one payload of a tensor."""

    def __init__(self, how: How, collective: Collective) -> None:
        assert not isinstance(how, PowerSGD), "PowerSGD has a combiner of its own"
        self._collective = collective
        self._codec: ErrorFeedback | None = None if isinstance(how, Exact) else ErrorFeedback(how.codec())

    def sum_(self, flat: torch.Tensor, weight: float) -> None:
        """Encode, gather, and add up in rank order."""
        codec = self._codec
        if codec is None or self._collective.size == 1:
            self._collective.sum_(flat, weight)
            return
        before = codec.state()
        payload = codec.encode(flat * weight)
        parts = self._collective.gather(payload.numpy().tobytes())
        flat.copy_(_decoded(codec, parts[0], flat))
        for part in parts[1:]:
            flat.add_(_decoded(codec, part, flat))
        # Finite sums have finite terms; a sum is cheaper than a look at each.
        if not flat.sum().isfinite() and not flat.isfinite().all():
            codec.load(before)  # all will throw this away, whoever spoilt it, so it counts as not sent

    def state(self) -> dict[str, Any]:
        """The residual."""
        return dict(self._codec.state()) if self._codec is not None else {}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a `state`."""
        if self._codec is not None:
            self._codec.load(state)


def _decoded(codec: Codec, part: bytes, like: torch.Tensor) -> torch.Tensor:
    payload = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return codec.decode(payload, like.numel()).to(like.device)
