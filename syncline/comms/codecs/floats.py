"""Every value as a float of its own: `ExactCodec` in 4 bytes, `BF16Codec` in 2.

Exact values are the same bit for bit, NaN and infinities included, and need no error feedback. bfloat16 is the upper
half of a float32, rounded to nearest, ties to even (Kalamkar et al. 2019): the relative error is at most 2^-8 (half a
unit of the 8-bit significand). NaN and infinities stay what they are; finite values that round past bfloat16's largest,
3.39e38, become infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.comms.codecs.codec import as_numbers, check_flat, check_payload
from syncline.comms.serialize import as_bytes


@dataclass(frozen=True)
class ExactCodec:
    """A `Codec`: float32 as it lies in memory."""

    @property
    def name(self) -> str:
        return "exact"

    def encode(self, flat: Tensor) -> Tensor:
        """A copy of the memory."""
        return as_bytes(check_flat(flat).clone())

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """A copy of the memory."""
        return as_numbers(check_payload(self, payload, numel), torch.float32).clone()

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel


@dataclass(frozen=True)
class BF16Codec:
    """A `Codec`: 2 bytes a value."""

    @property
    def name(self) -> str:
        return "bf16"

    def encode(self, flat: Tensor) -> Tensor:
        """Round each value; torch rounds to nearest even."""
        return as_bytes(check_flat(flat).to(torch.bfloat16))

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Widen each value, which is exact."""
        return as_numbers(check_payload(self, payload, numel), torch.bfloat16).to(torch.float32)

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel
