"""Replacing several tensors by their weighted sum, by compiled code.

Here: `add_copies`. torch needs several passes over memory (multiply, add, copy), which for the gradients of a small
model is most of an exchange. Not here: what is summed and when (`comms/`), and compiling (`build.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from syncline.compute.kernels.build import library


def add_copies(copies: Sequence[torch.Tensor], weights: Sequence[float]) -> bool:
    """Overwrite each of `copies` with their weighted sum. False if the kernel is unavailable: then nothing was done.

    The copies must not overlap. With several threads torch is faster, so the kernel is not used.
    """
    if torch.get_num_threads() > 1 or not all(map(_is_plain, copies)):
        return False
    kernels = library("sums")
    if kernels is None:
        return False
    number = len(copies)
    addresses = (ctypes.c_void_p * number)(*(copy.data_ptr() for copy in copies))
    factors, count = (ctypes.c_float * number)(*weights), ctypes.c_long(copies[0].numel())
    return bool(kernels.add_copies(addresses, number, factors, count) == 0)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
