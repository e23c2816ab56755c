"""Where the batches of a script come from.

Here: `Feed`: an order of samples and a source to read them from, made from a DataLoader (`loader_feed`) or from a
function that draws whole batches (`drawn_feed`). Not here: which part of it a worker gets, and when (`batches.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from syncline.data.loader_order import order_of
from syncline.data.order import SampleOrder, step_seed
from syncline.data.random_state import seeded
from syncline.data.source import DatasetSource, Indices, Source, as_source
from syncline.data.stream_order import stream_of
from syncline.errors import ConfigError, DataError

_DRAWS_PER_EPOCH = 1000
"""How many batches count as an epoch, for the ledger, if a script does not say how many it will take."""
_DRAWING = 0x42415443
"""Keeps the random stream of drawn batches apart from those of the steps."""


@dataclass(frozen=True)
class Feed:
    """Samples in an order, and a source to read them from."""

    order: SampleOrder
    source: Source
    loaders: int = 0
    """How many processes read; with none, a Dataset is read by the worker itself, as by torch's DataLoader."""
    is_endless: bool = False
    """Whether there are batches for as long as the script asks."""


def loader_feed(loader: DataLoader[Any], seed: int, warn: Callable[[str], None] = lambda _: None) -> Feed:
    """The samples of a DataLoader, in the order of its sampler or stream; its batches are global ones."""
    if isinstance(loader.dataset, IterableDataset):
        stream = stream_of(loader, seed, warn)
        return Feed(stream.order, stream.source, max(1, loader.num_workers))
    is_plain = isinstance(loader.dataset, TensorDataset) and loader.collate_fn is default_collate
    source = as_source(loader.dataset) if is_plain else DatasetSource(loader.dataset, loader.collate_fn)
    return Feed(order_of(loader, seed), source, loader.num_workers)


def drawn_feed(draw: Any, seed: int, *, steps: int | None, dim: int) -> Feed:
    """Batches that `draw` makes: a function of the step's number or of nothing, or tensors for a constant batch.

    Each draw is seeded by its number alone, so that all workers draw the same batch, and each keeps its part of it.
    """
    source = DrawnSource(_as_function(draw), seed, dim)
    number = steps if steps is not None else _DRAWS_PER_EPOCH
    order = SampleOrder(seed=seed, count=number * source.batch, batch=source.batch, shuffle=False)
    return Feed(order, source, is_endless=steps is None)


class DrawnSource:
    """A `Source` of batches that are drawn whole: sample i is number i % batch of draw i // batch."""

    def __init__(self, draw: Callable[[int], Any], seed: int, dim: int) -> None:
        self._draw, self._seed, self._dim = draw, seed, dim
        self._last: tuple[int, Any] = (-1, None)
        self.batch = _size_of(self._drawn(0), dim)
        if not self.batch:
            raise DataError("The first batch is empty. Draw at least one sample.", code="no-samples")

    def __len__(self) -> int:
        return self.batch

    def fetch(self, indices: Indices) -> Any:
        numbers = np.asarray(indices, dtype=np.int64)
        parts = []
        for draw in dict.fromkeys((numbers // self.batch).tolist()):
            parts.append(_part(self._drawn(draw), numbers[numbers // self.batch == draw] % self.batch, self._dim))
        return parts[0] if len(parts) == 1 else _joined(parts, self._dim)

    def _drawn(self, number: int) -> Any:
        if self._last[0] == number:
            return self._last[1]
        with seeded(step_seed(self._seed, number, _DRAWING)):
            drawn = self._draw(number)
        size = _size_of(drawn, self._dim)
        if hasattr(self, "batch") and size != self.batch:
            raise DataError(
                f"Batch {number} has {size} samples and batch 0 has {self.batch}. Draw as many in every step.",
                code="batch-size-changed", step=number, size=size, before=self.batch,
            )  # fmt: skip
        self._last = (number, drawn)
        return drawn


def _as_function(draw: Any) -> Callable[[int], Any]:
    if not callable(draw):
        _size_of(draw, 0)
        return lambda _: draw
    required = [
        p
        for p in inspect.signature(draw).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise ConfigError(
            f"worker.batches got a function with {len(required)} arguments. It is called with the number of the step, "
            "or with nothing: use a lambda for other arguments, as in worker.batches(lambda: get_batch('train')).",
            code="batch-function",
        )
    return draw if required else lambda _: draw()


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _size_of(batch: Any, dim: int) -> int:
    """How many samples a batch has, along dimension `dim` of its tensors."""
    sizes = {t.size(dim) if t.dim() > dim else -1 for t in _tensors_in(batch)}
    if len(sizes) != 1 or -1 in sizes:
        shapes = [tuple(t.shape) for t in _tensors_in(batch)]
        raise DataError(
            f"The tensors of a batch have the shapes {shapes}, so their samples cannot be divided along dimension "
            f"{dim}. All must have one entry per sample there; pass dim= if that is another dimension.",
            code="batch-shape",
        )
    return sizes.pop()


def _part(batch: Any, numbers: np.ndarray, dim: int) -> Any:
    """The samples with these `numbers`, in the structure of the batch."""
    low, high = int(numbers[0]), int(numbers[-1]) + 1
    is_range = high - low == len(numbers)

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        if is_range:
            return tensor.narrow(dim, low, high - low)
        return tensor.index_select(dim, torch.from_numpy(numbers))

    return pytree.tree_map_only(torch.Tensor, part_of, batch)


def _joined(parts: list[Any], dim: int) -> Any:
    """Parts of several batches as one."""

    def join(first: Any, *others: Any) -> Any:
        return torch.cat([first, *others], dim) if isinstance(first, torch.Tensor) else first

    return pytree.tree_map(join, *parts)
