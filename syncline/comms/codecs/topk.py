"""Only the largest values, with their places (Aji & Heafield 2017; Stich, Cordonnier & Jaggi 2018).

Of n values the  k = max(1, ceil(fraction n))  largest by magnitude travel, as int32 indices in ascending order and then
float32 values; all others decode to zero. Equal magnitudes: the lower index goes first, so that the choice does not
depend on how a library happens to select. Without error feedback, small values would never be heard of.

NaN counts as larger than infinity, which is larger than all else: both travel before any finite value, unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from syncline.comms.codecs.codec import as_numbers, check_flat, check_payload
from syncline.comms.serialize import as_bytes
from syncline.errors import ConfigError


@dataclass(frozen=True)
class TopKCodec:
    """A `Codec`: 8 bytes for each of the values that travel."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"The fraction of topk is {self.fraction}, but it must be above 0 and at most 1: "
                "0.01 sends one value in a hundred."
            )

    @property
    def name(self) -> str:
        return f"topk(fraction={self.fraction!r})"

    def count(self, numel: int) -> int:
        """k: how many of `numel` values travel."""
        # Of the decimal number that was typed: in binary 0.07 * 100 is a little more than 7.
        return min(numel, max(1, math.ceil(Fraction(repr(float(self.fraction))) * numel)))

    def encode(self, flat: Tensor) -> Tensor:
        """The places, then the values."""
        flat = check_flat(flat)
        if flat.numel() >= 2**31:
            raise ValueError(f"topk counts places with 31 bits, but this tensor has {flat.numel()} values. Cut it up.")
        places = _largest(flat, self.count(flat.numel()))
        return torch.cat((as_bytes(places.to(torch.int32)), as_bytes(flat[places])))

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Zeros but for the values that came."""
        payload = check_payload(self, payload, numel)
        head = len(payload) // 2
        places = as_numbers(payload[:head], torch.int32).to(torch.int64)
        values = as_numbers(payload[head:], torch.float32)
        return torch.zeros(numel, device=payload.device).index_copy_(0, places, values)

    def wire_bytes(self, numel: int) -> int:
        return 8 * self.count(numel)


def _largest(flat: Tensor, count: int) -> Tensor:
    """The places of the `count` largest magnitudes, ascending; of equal ones the first."""
    if count == flat.numel():
        return torch.arange(count, device=flat.device)
    # Without its sign bit a float32, read as an integer, sorts as its magnitude does, and NaN comes last of all.
    magnitudes = flat.view(torch.int32) & 0x7FFFFFFF
    rank = flat.numel() - count
    if flat.device.type == "cpu":
        # NumPy selects and searches with vector instructions, which here is ten times faster than torch.
        bits = magnitudes.numpy()
        threshold = int(np.partition(bits, rank)[rank])
        places = torch.from_numpy(np.flatnonzero(bits >= threshold))
    else:
        threshold = int(magnitudes.kthvalue(rank + 1).values)
        places = (magnitudes >= threshold).nonzero().view(-1)
    if len(places) > count:
        is_tie = magnitudes[places] == threshold
        above = len(places) - int(is_tie.sum())
        places = places[~is_tie | (is_tie.cumsum(0) <= count - above)]
    return places
