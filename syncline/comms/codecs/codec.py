"""What every codec can do, and what several of them need to do it.

Here: the `Codec` protocol, the checks at its two ends, bytes as numbers and numbers as bytes. Not here: the codecs (one
file each), the residual that lossy ones need (`feedback.py`), PowerSGD, which is no codec (`powersgd.py`), and sending
(`comms`).

What all codecs promise:

- `encode` is a deterministic function of the values: the same input gives the same bytes.
- `len(encode(x)) == wire_bytes(len(x))`, whatever the values are.
- Nothing crashes on NaN or infinity, and what goes in non-finite comes out non-finite somewhere, at least at its own
  place or in its own block, so that a check for NaN still finds it after decoding.
- Numbers travel in the byte order of the machine; workers of one run share it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Codec(Protocol):
    """A way to write a flat float32 tensor as bytes."""

    @property
    def name(self) -> str:
        """As one writes it in a run file: `int8`, `topk(fraction=0.01)`."""

    def encode(self, flat: Tensor) -> Tensor:
        """The bytes that travel: a new flat uint8 tensor."""

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The `numel` float32 values that a payload stands for: a new flat tensor."""

    def wire_bytes(self, numel: int) -> int:
        """How long the payload of `numel` values is."""


def check_flat(flat: Tensor) -> Tensor:
    """`flat`, contiguous; raises unless it is a flat float32 tensor."""
    if flat.dtype != torch.float32 or flat.dim() != 1:
        raise ValueError(
            f"A codec takes a flat float32 tensor, but got {flat.dtype} of shape {tuple(flat.shape)}. "
            "Flatten it and convert it to float32 first."
        )
    return flat.detach().contiguous()


def check_payload(codec: Codec, payload: Tensor, numel: int) -> Tensor:
    """`payload`, contiguous; raises if it cannot be `numel` values of this codec."""
    expected = codec.wire_bytes(numel)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != expected:
        raise ValueError(
            f"{numel} values encoded as {codec.name} are {expected} bytes, but this payload is {payload.numel()} of "
            f"{payload.dtype} in shape {tuple(payload.shape)}. Both ends must use the same codec and the same model."
        )
    return payload.contiguous()


def as_numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of `dtype`, shared where their place in memory allows it."""
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()  # torch views only what is aligned, and a payload may lie behind a header
    return payload.view(dtype)


def in_blocks(flat: Tensor, size: int) -> Tensor:
    """Rows of `size` values, the last one filled up with zeros; shared if nothing needed filling."""
    missing = -flat.numel() % size
    padded = functional.pad(flat, (0, missing)) if missing else flat
    return padded.view(padded.numel() // size, size)
