"""Tensors and state dicts as bytes, and back.

Here: the conversions that every exchange of bytes needs. Not here: lossy encodings (`codecs/`), checkpoint files
(`checkpoint/`), and a user's own objects, which only cloudpickle can serialize (`payload.py`).
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor


def dump_state(state: Any) -> bytes:
    """Tensors and plain values, in any nesting, as `torch.save` writes them."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def load_state(data: bytes) -> Any:
    """What `dump_state` wrote. Executes nothing from the data."""
    return torch.load(io.BytesIO(data), weights_only=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat uint8, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8)


def as_memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = as_bytes(tensor).numpy()  # NumPy's types do not say that an array has a buffer
    return memoryview(array)


def bytes_to_tensor(data: bytes | bytearray | memoryview) -> Tensor:
    """A flat uint8 tensor with a copy of the data."""
    # torch refuses an empty buffer, and warns of one that cannot be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
