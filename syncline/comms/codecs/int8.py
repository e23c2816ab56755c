"""Every value as one of 255 steps of its block: blocks of 256 values, one float32 scale each.

Block-wise scales, as in Dettmers et al. (2022), keep one large value from coarsening all others.

For a block x with scale  s = max_i |x_i| / 127:

    q_i = round(x_i / s) in -127..127  (ties to even),      decoded  s q_i,      so that  |x_i - s q_i| <= s / 2

up to the rounding of the quotient itself, one part in ten thousand of that.

Rounding is deterministic: with error feedback an unbiased coin toss brings nothing, and the same gradients must give
the same bytes. The payload holds all scales, then all q.

A block whose largest value is below 127 times the smallest normal float32 (about 1.5e-36) decodes to zeros: its scale
would be subnormal, with too few bits left to divide by. A block with a NaN or an infinity decodes to NaN throughout.
The last few values before float32 ends (3.4e38) may decode to infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.comms.codecs.codec import as_numbers, check_flat, check_payload, in_blocks
from syncline.comms.serialize import as_bytes

_BLOCK = 256
_STEPS = 127
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Int8Codec:
    """A `Codec`: one byte a value, and 4 for each block of 256."""

    @property
    def name(self) -> str:
        return "int8"

    def encode(self, flat: Tensor) -> Tensor:
        """The scales, then the steps."""
        flat = check_flat(flat)
        blocks = in_blocks(flat, _BLOCK)
        scales = blocks.abs().amax(1) / _STEPS
        scales = torch.where(scales < _SMALLEST_NORMAL, 0.0, scales)
        scales = torch.where(scales.isinf(), torch.nan, scales)
        # A product with the inverse leaves at most 127 (1 + 2^-22), which still rounds to 127: nothing to clamp.
        inverses = torch.where(scales > 0, scales.reciprocal(), 0.0)
        steps = (blocks * inverses.unsqueeze(1)).round_().view(-1)[: flat.numel()]
        payload = torch.empty(self.wire_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        head = 4 * len(scales)
        payload[:head].copy_(as_bytes(scales))
        payload[head:].view(torch.int8).copy_(steps)
        return payload

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        payload = check_payload(self, payload, numel)
        head = self.wire_bytes(numel) - numel
        scales = as_numbers(payload[:head], torch.float32)
        # Widened before the product: torch's product of two types is twenty times slower.
        steps = payload[head:].view(torch.int8).to(torch.float32)
        return in_blocks(steps, _BLOCK).mul_(scales.unsqueeze(1)).view(-1)[:numel]

    def wire_bytes(self, numel: int) -> int:
        """n + 4 ceil(n / 256)."""
        return numel + 4 * -(-numel // _BLOCK)
