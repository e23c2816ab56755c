"""Every value as bfloat16: the upper half of a float32, rounded to nearest, ties to even (Kalamkar et al. 2019).

The relative error is at most 2^-8 (half a unit of the 8-bit significand). NaN and infinities stay what they are; finite
values that round past bfloat16's largest, 3.39e38, become infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.algorithms.codecs.codec import as_bytes, as_numbers, check_flat, check_payload

__all__ = ["BF16"]


@dataclass(frozen=True)
class BF16:
    """A `Codec`: 2 bytes a value."""

    @property
    def name(self) -> str:
        """`bf16`."""
        return "bf16"

    def encode(self, flat: Tensor) -> Tensor:
        """Round each value; torch rounds to nearest even."""
        return as_bytes(check_flat(flat).to(torch.bfloat16))

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Widen each value, which is exact."""
        return as_numbers(check_payload(self, payload, numel), torch.bfloat16).to(torch.float32)

    def wire_bytes(self, numel: int) -> int:
        """2 n."""
        return 2 * numel
