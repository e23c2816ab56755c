"""Every value as it is: 4 bytes each, bit for bit, NaN and infinities included. Needs no error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.algorithms.codecs.codec import as_bytes, as_numbers, check_flat, check_payload

__all__ = ["Exact"]


@dataclass(frozen=True)
class Exact:
    """A `Codec`: float32 as it lies in memory."""

    @property
    def name(self) -> str:
        """`exact`."""
        return "exact"

    def encode(self, flat: Tensor) -> Tensor:
        """A copy of the memory."""
        return as_bytes(check_flat(flat).clone())

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """A copy of the memory."""
        return as_numbers(check_payload(self, payload, numel), torch.float32).clone()

    def wire_bytes(self, numel: int) -> int:
        """4 n."""
        return 4 * numel
