"""Where the batches of a script come from.

Here: `Feed`: an order of samples and a source to read them from, made from a DataLoader (`loader_feed`), from a
function that draws whole batches (`drawn_feed`), or from a list of them (`listed_feed`). Not here: which part of it a
worker gets, and when (`batches.py`), and how a whole batch is divided (`whole_batches.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from syncline.data.loader_order import order_of
from syncline.data.order import SampleOrder, step_seed
from syncline.data.random_state import seeded
from syncline.data.source import DatasetSource, Indices, Source, as_source
from syncline.data.stream_order import stream_of
from syncline.errors import ConfigError, DataError
from syncline.workers.own_loop.whole_batches import joined, part_of, size_of

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


def listed_feed(batches: Sequence[Any], seed: int, *, dim: int) -> Feed:
    """The whole batches of an epoch, of the same size but for the last, which may be smaller."""
    if not batches:
        raise DataError("worker.batches got no batches. Give those of an epoch.", code="no-samples")
    source = DrawnSource(lambda number: batches[number], seed, dim, last=len(batches) - 1)
    count = (len(batches) - 1) * source.batch + size_of(batches[-1], dim)
    return Feed(SampleOrder(seed=seed, count=count, batch=source.batch, shuffle=False), source)


class DrawnSource:
    """A `Source` of batches that are drawn whole: sample i is number i % batch of draw i // batch.

    Draw number `last` may have fewer samples than the others.
    """

    def __init__(self, draw: Callable[[int], Any], seed: int, dim: int, last: int | None = None) -> None:
        self._draw, self._seed, self._dim, self._last_draw = draw, seed, dim, last
        self._last: tuple[int, Any] = (-1, None)
        self.batch = size_of(self._drawn(0), dim)
        if not self.batch:
            raise DataError("The first batch is empty. Draw at least one sample.", code="no-samples")

    def __len__(self) -> int:
        return self.batch

    def fetch(self, indices: Indices) -> Any:
        numbers = np.asarray(indices, dtype=np.int64)
        parts = []
        for draw in dict.fromkeys((numbers // self.batch).tolist()):
            parts.append(part_of(self._drawn(draw), numbers[numbers // self.batch == draw] % self.batch, self._dim))
        return parts[0] if len(parts) == 1 else joined(parts, self._dim)

    def _drawn(self, number: int) -> Any:
        if self._last[0] == number:
            return self._last[1]
        with seeded(step_seed(self._seed, number, _DRAWING)):
            drawn = self._draw(number)
        size = size_of(drawn, self._dim)
        is_last = number == self._last_draw and size <= getattr(self, "batch", size)
        if hasattr(self, "batch") and size != self.batch and not is_last:
            raise DataError(
                f"Batch {number} has {size} samples and batch 0 has {self.batch}. Draw as many in every step.",
                code="batch-size-changed", step=number, size=size, before=self.batch,
            )  # fmt: skip
        self._last = (number, drawn)
        return drawn


def _as_function(draw: Any) -> Callable[[int], Any]:
    if not callable(draw):
        size_of(draw, 0)
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
