"""The sample order of a torch DataLoader, whatever its sampler.

Here: `order_of`. The order of each epoch is drawn once, in full, from the loader's sampler or batch sampler, and then
divided among the workers like any other order. Shuffled and sequential loaders use Syncline's own order, which needs no
drawing. Not here: streams (`stream_order.py`), the division (`assignment.py`) and reading samples (`source.py`,
`prefetch.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from syncline.data.length import length_of
from syncline.data.order import HOLE, SampleOrder, step_seed
from syncline.data.random_state import seeded
from syncline.errors import ConfigError, DataError

_MOST_SAMPLES = 10**8
_DRAWING = 0x44524157
"""Keeps the random stream of samplers apart from those of the steps."""


def order_of(loader: DataLoader[Any], seed: int) -> SampleOrder:
    """The order in which `loader` serves its samples, as a function of `seed` and the epoch alone."""
    if isinstance(loader.sampler, DistributedSampler):
        raise ConfigError(
            "The DataLoader has a DistributedSampler, which serves each process a part of the data. Syncline divides "
            "every batch itself: use DataLoader(dataset, batch_size=<the global batch>, shuffle=...).",
            code="sampler",
            sampler="DistributedSampler",
        )
    if loader.batch_size is None:
        if loader.batch_sampler is None:
            raise ConfigError(
                "The DataLoader has batch_size=None, so it serves single samples without batches, which cannot be "
                "divided among workers. Set batch_size to the global batch.",
                code="no-batches",
            )
        return _order_of_batches(loader.batch_sampler, seed)
    sampler: Any = loader.sampler
    batch = loader.batch_size
    count = length_of(loader.dataset)
    is_random = type(sampler) is RandomSampler
    if type(sampler) is SequentialSampler or (is_random and not sampler.replacement and sampler.num_samples == count):
        if loader.drop_last and count % batch:
            return _without_last(SampleOrder(seed=seed, count=count, batch=batch, shuffle=is_random))
        return SampleOrder(seed=seed, count=count, batch=batch, shuffle=is_random)
    return _order_of_samples(sampler, batch, seed, drop_last=loader.drop_last)


def _without_last(order: SampleOrder) -> SampleOrder:
    """The same order without the incomplete batch at its end."""
    used = order.count - order.count % order.batch
    if not used:
        raise _no_batch(order.count, order.batch)
    return SampleOrder(
        seed=order.seed,
        count=used,
        batch=order.batch,
        shuffle=order.shuffle,
        draw=lambda epoch: order._order(epoch)[:used],
    )


def _order_of_samples(sampler: Any, batch: int, seed: int, *, drop_last: bool) -> SampleOrder:
    _check_length(sampler)
    first = _drawn(sampler, seed, 0)
    used = len(first) - len(first) % batch if drop_last else len(first)
    if not used:
        raise _no_batch(len(first), batch)

    def draw(epoch: int) -> np.ndarray:
        return _checked(_drawn(sampler, seed, epoch)[:used], used, sampler, epoch)

    return SampleOrder(seed=seed, count=used, batch=batch, shuffle=False, draw=draw)


def _order_of_batches(sampler: Any, seed: int) -> SampleOrder:
    """Batches of different sizes lie in the order with holes, so that the k-th batch begins at k times the largest."""
    first = _drawn_batches(sampler, seed, 0)
    batch = max((len(indices) for indices in first), default=0)
    if not batch:
        raise ConfigError("The batch sampler yields no samples, so there is nothing to train on.", code="no-samples")
    batches = len(first)
    largest = _largest_of(sampler, batch)

    def draw(epoch: int) -> np.ndarray:
        drawn = _drawn_batches(sampler, seed, epoch)
        if len(drawn) != batches or any(len(indices) > largest for indices in drawn):
            sizes = f"{len(drawn)} batches of at most {max(map(len, drawn), default=0)} samples"
            raise _changed(sampler, f"{sizes} in epoch {epoch + 1}, and {batches} of at most {largest} in the first")
        laid = np.full((batches, largest), HOLE, np.int64)
        for row, indices in zip(laid, drawn, strict=True):
            row[: len(indices)] = indices
        return laid.reshape(-1)

    return SampleOrder(seed=seed, count=batches * largest, batch=largest, shuffle=False, draw=draw)


def _largest_of(sampler: Any, seen: int) -> int:
    """The size of the largest batch; a sampler that declares one may not have used it in the first epoch."""
    declared = getattr(sampler, "batch_size", None)
    return max(seen, declared) if isinstance(declared, int) and isinstance(sampler, BatchSampler) else seen


def _drawn(sampler: Any, seed: int, epoch: int) -> np.ndarray:
    with _seeded(sampler, seed, epoch):
        indices = np.fromiter((int(i) for i in sampler), np.int64)
    if len(indices) and indices.min() < 0:
        raise DataError(f"{type(sampler).__name__} yields the index {indices.min()}. Indices start from 0.")
    return indices


def _drawn_batches(sampler: Any, seed: int, epoch: int) -> list[Sequence[int]]:
    inner = getattr(sampler, "sampler", None)
    with _seeded(sampler, seed, epoch), _seeded(inner, seed, epoch):
        return [list(indices) for indices in sampler]


@contextmanager
def _seeded(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """All random numbers that a sampler may draw, as a function of `seed` and `epoch`; the script's own are kept."""
    own = getattr(sampler, "generator", None)
    drawing = step_seed(seed, epoch, _DRAWING)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(own, torch.Generator):
        own.manual_seed(drawing)
    with seeded(drawing):
        yield


def _checked(indices: np.ndarray, count: int, sampler: Any, epoch: int) -> np.ndarray:
    if len(indices) != count:
        raise _changed(sampler, f"{len(indices)} samples in epoch {epoch + 1}, and {count} in the first")
    return indices


def _check_length(sampler: Any) -> None:
    length = len(sampler) if hasattr(sampler, "__len__") else 0
    if length > _MOST_SAMPLES:
        name = type(sampler).__name__
        raise ConfigError(
            f"{name} yields {length:,} samples in an epoch, more than Syncline can account for ({_MOST_SAMPLES:,}). "
            "Use a smaller num_samples and more epochs, or draw batches with worker.batches.",
            code="sampler-length",
            sampler=name,
        )


def _changed(sampler: Any, how: str) -> DataError:
    name = type(sampler).__name__
    return DataError(
        f"{name} yields {how}. Syncline numbers the samples of all epochs alike: let it yield the same number in every "
        "epoch, for instance with drop_last or by repeating some.",
        code="sampler-length",
        sampler=name,
    )


def _no_batch(count: int, batch: int) -> ConfigError:
    return ConfigError(
        f"The DataLoader has drop_last=True and {count} samples, fewer than one batch of {batch}: there is nothing to "
        "train on. Use a smaller batch_size, or remove drop_last.",
        code="drop-last",
        count=count,
        batch=batch,
    )
