"""Whole batches, which a script makes itself, and the parts of them that workers get.

Here: how many samples a batch has, its part with certain samples, and several parts as one; pure functions of the
tensors in a batch. Not here: which samples a worker gets (`data/assignment.py`), and where batches come from
(`feed.py`).

The samples lie along one dimension of all tensors. A tensor with too few dimensions for that may be flattened: language
models have inputs of (time, samples) and targets of (time * samples). It is divided as if it had the dimensions of the
first tensor of the batch that has enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from syncline.errors import DataError


def is_list_of_batches(draw: Any) -> bool:
    """Whether a script gives several batches, not one: a generator of any, or a list of tuples or dicts of tensors."""
    if isinstance(draw, Iterator):
        return True
    return isinstance(draw, list) and bool(draw) and all(isinstance(batch, (tuple, dict)) for batch in draw)


def size_of(batch: Any, dim: int) -> int:
    """How many samples a batch has, along dimension `dim` of its tensors."""
    tensors = _tensors_in(batch)
    leading = _leading(tensors, dim)
    sizes = {leading[dim] if _is_flattened(t, leading, dim) else t.size(dim) if t.dim() > dim else -1 for t in tensors}
    if len(sizes) != 1 or -1 in sizes:
        shapes = [tuple(t.shape) for t in tensors]
        raise DataError(
            f"The tensors of a batch have the shapes {shapes}, so their samples cannot be divided along dimension "
            f"{dim}. All must have one entry per sample there; pass dim= if that is another dimension.",
            code="batch-shape",
        )
    return sizes.pop()


def part_of(batch: Any, numbers: np.ndarray, dim: int) -> Any:
    """The samples with these `numbers`, in the structure of the batch."""
    low, high = int(numbers[0]), int(numbers[-1]) + 1
    is_range = high - low == len(numbers)
    leading = _leading(_tensors_in(batch), dim)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if _is_flattened(tensor, leading, dim):
            return part(tensor.view(*leading, *tensor.shape[1:])).flatten(0, dim)
        if is_range:
            return tensor.narrow(dim, low, high - low)
        return tensor.index_select(dim, torch.from_numpy(numbers))

    return pytree.tree_map_only(torch.Tensor, part, batch)


def joined(parts: list[Any], dim: int) -> Any:
    """Parts of several batches as one."""
    leading = [_leading(_tensors_in(part), dim) for part in parts]
    if len({shape[:dim] for shape in leading}) > 1:
        raise DataError(
            f"After a worker failure, samples of several batches are to be trained together, and theirs begin with the "
            f"shapes {sorted(set(leading))}. Make batches that differ in the number of samples only, or use "
            "--on-worker-failure replace-only.",
            code="batch-shape",
        )

    def join(*tensors: Any) -> Any:
        if not isinstance(tensors[0], torch.Tensor):
            return tensors[0]
        if not _is_flattened(tensors[0], leading[0], dim):
            return torch.cat(tensors, dim)
        unflattened = [t.view(*shape, *t.shape[1:]) for t, shape in zip(tensors, leading, strict=True)]
        return torch.cat(unflattened, dim).flatten(0, dim)

    return pytree.tree_map(join, *parts)


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _leading(tensors: list[torch.Tensor], dim: int) -> tuple[int, ...]:
    """The dimensions up to that of the samples, of the first tensor that has them; empty if none has."""
    return next((tuple(t.shape[: dim + 1]) for t in tensors if t.dim() > dim), ())


def _is_flattened(tensor: torch.Tensor, leading: tuple[int, ...], dim: int) -> bool:
    return 0 < tensor.dim() <= dim and bool(leading) and tensor.size(0) == math.prod(leading)
