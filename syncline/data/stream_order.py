"""How many samples of a stream make an epoch, and their order.

Here: `stream_of`, for a DataLoader with an IterableDataset. `__len__` says how many samples there are; without it they
are counted before the training, which takes as long as reading them. Not here: reading (`stream.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from syncline.data.length import length_of
from syncline.data.order import SampleOrder
from syncline.data.prefetch import read_in_process
from syncline.data.stream import Counter, StreamSource
from syncline.errors import ConfigError

MOST_SAMPLES = 10**8
"""More than that is an endless stream, or one that a ledger cannot account for."""
LONGEST_COUNT_S = 600.0
_REPORTED_AFTER_S = 5.0


class Stream(NamedTuple):
    """A stream and the order of its samples, which is their own."""

    order: SampleOrder
    source: StreamSource


def stream_of(loader: DataLoader[Any], seed: int, warn: Callable[[str], None]) -> Stream:
    """The stream that `loader` reads; `ConfigError` if its samples cannot be numbered."""
    check_has_batches(loader)
    batch = loader.batch_size
    assert batch is not None, "it has batches"
    is_declared = hasattr(loader.dataset, "__len__")
    count = length_of(loader.dataset) if is_declared else _counted(StreamSource(loader, seed), warn)
    if count > MOST_SAMPLES:
        raise _endless(loader, f"its __len__ is {count:,}, more than Syncline can account for ({MOST_SAMPLES:,})")
    used = count - count % batch if loader.drop_last else count
    if used < 1:
        raise ConfigError(
            f"{type(loader.dataset).__name__} has {count} samples"
            + (f", and the DataLoader drops the last batch if it has fewer than {batch}" if loader.drop_last else "")
            + ": there is nothing to train on.",
            code="drop-last" if count else "no-samples",
            count=count,
            batch=batch,
        )
    order = SampleOrder(seed=seed, count=used, batch=batch, shuffle=False)
    return Stream(order, StreamSource(loader, seed, count=used, is_declared=is_declared))


def check_has_batches(loader: DataLoader[Any]) -> None:
    """Refuse a stream of whole batches: they cannot be divided into samples."""
    if loader.batch_size is None:
        raise ConfigError(
            "The DataLoader has batch_size=None, so its dataset makes the batches itself. Syncline divides batches by "
            "samples: let the dataset yield samples, and set batch_size to the global batch.",
            code="no-batches",
        )


def _counted(source: StreamSource, warn: Callable[[str], None]) -> int:
    count, began, has_warned = 0, time.monotonic(), False
    received = read_in_process(Counter(source))
    for count in received:
        seconds = time.monotonic() - began
        if count > MOST_SAMPLES or seconds > LONGEST_COUNT_S:
            received.close()
            raise _endless(source._loader, f"counting its samples was given up at {count:,}, after {seconds:.0f} s")
        if seconds > _REPORTED_AFTER_S and not has_warned:
            has_warned = True
            warn(
                f"{source.name} has no __len__, so its samples are counted before the training: {count:,} so far. "
                "Define __len__ to save that time."
            )
    return count


def _endless(loader: DataLoader[Any], why: str) -> ConfigError:
    name = type(loader.dataset).__name__
    return ConfigError(
        f"The stream of {name} may have no end: {why}. Give the dataset a __len__: so many samples of the stream are "
        "then an epoch, which can be resumed and accounted for. Or draw batches by their number, with "
        "worker.batches(get_batch).",
        code="endless-stream",
        dataset=name,
    )
