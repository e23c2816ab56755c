"""What a lossy codec loses, kept and sent later: error feedback (Seide et al. 2014; Karimireddy et al. 2019).

With residual e, starting at zero, each exchange of x sends

    p = encode(x + e),      e <- (x + e) - decode(p)

so that after T exchanges the sum of what was decoded is the sum of all x but for the one residual still held: nothing
is lost, only late. That holds for any codec whose error is smaller than its input; the residual then stays bounded.

Here: the step as a pure function (`compensate`) and an object that remembers the residual (`ErrorFeedback`), which is
itself a `Codec`. Not here: what x is. The residual has the scale of x, so if x is a gradient and the learning rate
changes, the part that comes late is applied with the new rate.

The training loop discards a step with NaN or infinity, so it must not spoil later ones: it leaves the residual as it
was. To discard a step because of another worker's NaN, keep the `state()` from before the step and `load` it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.comms.codecs.codec import Codec, check_flat


class Compensated(NamedTuple):
    """One exchange with error feedback."""

    payload: Tensor
    decoded: Tensor  # what the receivers will make of the payload
    residual: Tensor  # e for the next exchange


def compensate(codec: Codec, flat: Tensor, residual: Tensor | None) -> Compensated:
    """Encode `flat + residual`, and what that leaves for the next time; no residual is a residual of zeros."""
    flat = check_flat(flat)
    if residual is not None and residual.shape != flat.shape:
        raise ValueError(
            f"The residual has {residual.numel()} values, but the tensor to encode has {flat.numel()}. "
            "A residual belongs to one model: start without one if the model has changed."
        )
    wanted = flat.clone() if residual is None else flat + residual
    payload = codec.encode(wanted)
    decoded = codec.decode(payload, flat.numel())
    left = wanted.sub_(decoded)  # in place: fresh memory costs more than the subtraction
    # The sum is ten times cheaper than looking at each value, and finite sums have finite terms.
    if not left.sum().isfinite() and not left.isfinite().all():
        left = torch.zeros_like(flat) if residual is None else residual
    return Compensated(payload, decoded, left)


class ErrorFeedback:
    """A `Codec` that remembers what `codec` lost and adds it to the next tensor. One for each tensor exchanged."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residual: Tensor | None = None

    @property
    def name(self) -> str:
        """That of the codec: the payload does not show that there was a residual in it."""
        return self.codec.name

    @property
    def residual(self) -> Tensor | None:
        """e; None before the first exchange. Replaced at each exchange, never written to."""
        return self._residual

    def encode(self, flat: Tensor) -> Tensor:
        """The payload of `flat` and the residual, whose successor is remembered."""
        return self.compensate(flat).payload

    def compensate(self, flat: Tensor) -> Compensated:
        """Like `encode`, for a caller who also wants what the payload decodes to: it is known here already."""
        step = compensate(self.codec, flat, self._residual)
        self._residual = step.residual
        return step

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return self.codec.decode(payload, numel)

    def wire_bytes(self, numel: int) -> int:
        return self.codec.wire_bytes(numel)

    def state(self) -> dict[str, Tensor]:
        """The residual, for a checkpoint; without a copy, for it is never written to."""
        return {} if self._residual is None else {"residual": self._residual}

    def load(self, state: Mapping[str, Tensor]) -> None:
        residual = state.get("residual")
        self._residual = None if residual is None else check_flat(residual)

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"
