"""Every value as its sign: 1-bit SGD (Seide, Fu, Droppo, Li & Yu 2014), 30 times smaller than float32.

For each block of 1024 values, one bit a value and two float32 numbers to decode it to:

    bit_i = [x_i >= 0],      a+ = mean of the x_i >= 0,      a- = mean of the x_i < 0,      decoded  a+ if bit_i else a-

Given the bits, the two means are the numbers with the least square error. (The paper has one pair for each column of a
weight matrix; a block of fixed size does the same for a tensor that has been flattened.) One step of this says little
about the values; it trains as well as float32 only with error feedback, which the paper introduced for it.

The payload holds all pairs (a-, a+), then the bits, the first value in the lowest bit. A block with a NaN decodes to
NaN throughout; one with an infinity decodes to that infinity for all values of its sign. So does a block whose sum of
positive or of negative values exceeds float32: beyond 3e35 on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.comms.codecs.codec import as_numbers, check_flat, check_payload, in_blocks
from syncline.comms.serialize import as_bytes

_BLOCK = 1024
# Bytes b_0 .. b_7 of 0 or 1, read as one little-endian word, times this: bit i of the product's top byte is b_i. Byte i
# is bit 8i of the word and meets the factor's bit 7 (8 - i) at 56 + i; all other products fall on bits of their own.
_GATHER_BITS = 0x0102040810204080
# For each byte, its eight bits as masks: 0 or -1, which is all ones.
_MASKS = -((torch.arange(256, dtype=torch.int32).unsqueeze(1) >> torch.arange(8, dtype=torch.int32)) & 1)


@dataclass(frozen=True)
class OneBitCodec:
    """A `Codec`: one bit a value, and 8 bytes for each block of 1024."""

    @property
    def name(self) -> str:
        return "onebit"

    def encode(self, flat: Tensor) -> Tensor:
        """The pairs of means, then the bits."""
        flat = check_flat(flat)
        numel = flat.numel()
        blocks = in_blocks(flat, _BLOCK)
        words = (blocks >= 0).view(torch.int64)
        # Added as words, each of the eight bytes counts up to 128 without touching its neighbor; then add the eight.
        non_negative = words.sum(1).view(torch.uint8).view(len(blocks), 8).sum(1)
        sizes = torch.full_like(non_negative, _BLOCK)
        if filling := blocks.numel() - numel:  # zeros that are no values
            non_negative[-1] -= filling
            sizes[-1] -= filling
        counts = torch.stack((sizes - non_negative, non_negative), 1)
        sums = torch.stack((blocks.clamp(max=0).sum(1), blocks.clamp(min=0).sum(1)), 1)
        means = sums / counts.clamp(min=1)

        payload = torch.empty(self.wire_bytes(numel), dtype=torch.uint8, device=flat.device)
        head = 8 * len(means)
        payload[:head].copy_(as_bytes(means))
        packed = ((words * _GATHER_BITS) >> 56) & 0xFF
        payload[head:].copy_(packed.view(-1)[: len(payload) - head])
        return payload

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The mean that each bit stands for."""
        payload = check_payload(self, payload, numel)
        head = 8 * -(-numel // _BLOCK)
        means = as_numbers(payload[:head], torch.int32).view(head // 8, 2)
        negative, non_negative = means[:, :1], means[:, 1:]
        masks = _MASKS.to(payload.device).index_select(0, payload[head:].to(torch.int32)).view(-1)
        # A choice by masks on the bits of the means: torch.where with broadcast sides takes several times longer.
        chosen = in_blocks(masks, _BLOCK).bitwise_and_(negative ^ non_negative).bitwise_xor_(negative)
        return chosen.view(torch.float32).view(-1)[:numel]

    def wire_bytes(self, numel: int) -> int:
        """ceil(n / 8) + 8 ceil(n / 1024)."""
        return -(-numel // 8) + 8 * -(-numel // _BLOCK)
