"""Samples as bytes, to be sent from one process to another.

Here: `packed` and `unpacked`. torch would send each tensor as a file descriptor, through a socket in the folder for
temporary files: that takes long for many small tensors, and the socket stays there if the process is killed.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays, which is a single copy of their memory."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or thing.device.type != "cpu" or thing.layout != torch.strided:
            return NotImplemented
        if thing.requires_grad or thing.is_conj() or thing.is_neg() or thing.is_quantized:
            return NotImplemented
        try:
            return _tensor, (np.ascontiguousarray(thing.numpy()).reshape(thing.shape),)
        except TypeError:  # a type that NumPy does not have, such as bfloat16
            return NotImplemented


def packed(data: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(data)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return pickle.loads(data)  # from a child process of our own


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)
