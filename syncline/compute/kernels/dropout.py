"""Dropout masks as a pure function of counters, by compiled code or by torch, with the same bits.

Here: `Draw`, which has the key of one call of dropout, and the functions of tensors that use it. A mask is a function
of (key, sample, element within the sample), in the order of the dimensions, whatever the memory format is. The
generator is Philox4x32-10; `dropout.cpp` says which word is for which element. Not here: what the key depends on, and
which rows are of which sample (`compute/dropout.py`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from syncline.compute.kernels.build import library

_LANES, _ROUNDS = 16, 10
_GROUP = 4 * _LANES
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_PER_THREAD = 32768
"""Starting a thread takes longer than this many elements."""
_COMPILED = {torch.float32: "drop_float", torch.float64: "drop_double", torch.bfloat16: "drop_bfloat16"}
_ARGUMENTS = (
    *(ctypes.c_uint32,) * 3, ctypes.c_double, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_int,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draw:
    """One call of dropout: elements are dropped with `probability`, between 0 and 1; `key` has 64 bits."""

    key: int
    probability: float

    @property
    def least(self) -> int:
        """An element stays if its random word, of 32 bits, is at least this."""
        return min(round(self.probability * 2**32), _LOW)


def drop(draw: Draw, samples: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x`, which is contiguous, with some elements zero and the others scaled up.

    Its rows are those of `samples`, or as many consecutive ones for each.
    """
    compiled = _compiled(x.dtype) if x.device.type == "cpu" else None
    if compiled is None:
        return x * ones(draw, samples, x.shape, x.dtype, x.device)
    y = torch.empty_like(x)
    _call(compiled, draw, samples, x, y)
    return y


def ones(
    draw: Draw, samples: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Ones of this shape with some elements zero and the others scaled up, in contiguous memory."""
    if device.type == "cpu" and (compiled := _compiled(dtype)) is not None:
        y = torch.empty(shape, dtype=dtype)
        _call(compiled, draw, samples, None, y)
        return y
    words = random_words(draw.key, samples.to(device), math.prod(shape) // len(samples))
    return (words >= draw.least).to(dtype).mul_(scale_of(draw.probability, dtype)).view(shape)


@functools.lru_cache(maxsize=1024)
def scale_of(probability: float, dtype: torch.dtype) -> float:
    """By how much to multiply what stays: rounded, so that the product is the same by compiled code and by torch."""
    return float(torch.tensor(1 / (1 - probability), dtype=dtype))


def random_words(key: int, samples: torch.Tensor, count: int) -> torch.Tensor:
    """The words, of 32 bits, for the first `count` elements of each sample, as (samples, count) of int64."""
    groups = -(-count // _GROUP)
    blocks = torch.arange(groups * _LANES, dtype=torch.int64, device=samples.device)
    rows = samples.view(-1, 1)
    a, b = (blocks & _LOW).expand(len(rows), -1), (blocks >> 32).expand(len(rows), -1)
    c, d = (rows & _LOW).expand(-1, len(blocks)), ((rows >> 32) & _LOW).expand(-1, len(blocks))
    for turn in range(_ROUNDS):
        keys = [(half + turn * step) & _LOW for half, step in zip((key, key >> 32), _STEPS, strict=True)]
        left, right = a * _FACTORS[0], c * _FACTORS[1]  # overflow keeps the lower 64 bits, which is right
        a, b = _high(right) ^ b ^ keys[0], right & _LOW
        c, d = _high(left) ^ d ^ keys[1], left & _LOW
    words = torch.stack([word.reshape(len(rows), groups, _LANES) for word in (a, b, c, d)], dim=2)
    return words.view(len(rows), groups * _GROUP)[:, :count]


def _high(product: torch.Tensor) -> torch.Tensor:
    return (product >> 32) & _LOW


def _compiled(dtype: torch.dtype) -> ctypes._NamedFuncPointer | None:
    """The kernel for this type of numbers, if there is one."""
    name = _COMPILED.get(dtype)
    return None if name is None else _functions().get(name)


@functools.cache
def _functions() -> dict[str, ctypes._NamedFuncPointer]:
    kernels = library("dropout")
    if kernels is None:
        return {}
    found = {name: kernels[name] for name in _COMPILED.values()}
    for function in found.values():
        function.argtypes, function.restype = _ARGUMENTS, None
    return found


def _call(
    kernel: ctypes._NamedFuncPointer, draw: Draw, samples: torch.Tensor, x: torch.Tensor | None, y: torch.Tensor
) -> None:
    rows = len(samples)
    threads = max(1, min(torch.get_num_threads(), y.numel() // _PER_THREAD))
    kernel(
        draw.key & _LOW, draw.key >> 32, draw.least, scale_of(draw.probability, y.dtype), samples.data_ptr(), rows,
        y.numel() // rows, None if x is None else x.data_ptr(), y.data_ptr(), threads,
    )  # fmt: skip
