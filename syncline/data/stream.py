"""Streams: the samples of a torch IterableDataset, numbered by their place in it.

Here: `StreamSource`, and what runs in the process that reads it: `ShareReader` and `PartReader`, which read the whole
stream in order and collate only what this worker needs, and `Counter`. Not here: starting that process
(`prefetch.py`), and how many samples an epoch has (`stream_order.py`).

Sample k of an epoch is the k-th that the DataLoader serves in one process: with several loader processes, they take
turns by batches. Only reading everything before a sample gives its number, so every worker reads the whole stream.
To read on from the middle, it reads again from the start.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from syncline.compute.partition import share as part_of
from syncline.compute.processes import die_with_starter
from syncline.data.assignment import Range
from syncline.data.order import Share, step_seed
from syncline.data.packing import packed, unpacked
from syncline.data.random_state import seeded
from syncline.data.source import DatasetSource
from syncline.errors import DataError

_READING = 0x53545245
"""Keeps the random numbers of streams apart from those of the steps."""
_TICK_S = 0.2
"""How often a process that skips samples shows that it is alive, and can be stopped."""
_COMPARED_SAMPLES = 4
"""Of how many samples of a batch the checksum is made."""
_COMPARED_NUMBERS = 256
"""Of how many numbers of each tensor."""


class Portion(NamedTuple):
    """What a reading process sends for one step."""

    packed: bytes
    """The batch of this worker."""
    checksum: int = 0
    """Of the samples of all workers in this step."""
    has_more: bool = False
    """Whether the stream continues after the last sample of its epoch."""


class StreamSource:
    """The IterableDataset of a DataLoader, with its batch size, loader processes and collate function."""

    def __init__(self, loader: DataLoader[Any], seed: int, *, count: int = 0, is_declared: bool = False) -> None:
        assert loader.batch_size is not None, "checked before"
        self.dataset, self.batch, self.seed = loader.dataset, loader.batch_size, seed
        self.name = type(loader.dataset).__name__
        self.drop_last = loader.drop_last
        self.count = count
        """How many samples of an epoch are used."""
        self.is_declared = is_declared
        """Whether `__len__` says how many there are; they were counted otherwise."""
        self._loader = loader
        self._collating = DatasetSource(loader.dataset, loader.collate_fn)

    def __len__(self) -> int:
        return self.count

    def fetch(self, indices: Any) -> Any:
        """Sources have samples by index. A stream has not: it is read by processes, in order."""
        raise TypeError(f"A stream has no samples by index: {indices}.")

    def items(self, epoch: int) -> Iterator[Any]:
        """The samples of an epoch in order. It seeds the generators of this process, which is for reading only."""
        reading = step_seed(self.seed, epoch, _READING)
        random.seed(reading)
        np.random.seed(reading % 2**32)
        torch.manual_seed(reading)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        torch_worker._worker_info = None  # without loader processes the dataset must not see this process as one
        multiprocessing.current_process().daemon = False  # torch's own may have no child processes
        loaders = self._loader.num_workers
        batches = DataLoader(
            self.dataset,
            batch_size=self.batch,
            collate_fn=packed if loaders else list,
            num_workers=loaders,
            prefetch_factor=self._loader.prefetch_factor if loaders else None,
            worker_init_fn=_LoaderInit(self._loader.worker_init_fn),
            generator=torch.Generator().manual_seed(reading),
            multiprocessing_context="fork" if loaders else None,
        )
        return itertools.chain.from_iterable(map(unpacked, batches) if loaders else batches)

    def collated(self, numbers: list[int], items: list[Any], step: int) -> bytes:
        """The items as a batch, packed. Random numbers that are drawn for it are not missing from the stream."""
        with seeded(step_seed(self.seed, step, numbers[0])):
            return packed(self._collating.collated(numbers, items))


class ShareReader(IterableDataset[Any]):
    """Runs in the reading process: a `Portion` for each share; None now and then, to show that it is alive."""

    def __init__(self, source: StreamSource, shares: Iterator[Share]) -> None:
        self._source, self._shares = source, shares

    def __iter__(self) -> Iterator[Any]:
        return _with_errors_sent(self._portions())

    def _portions(self) -> Iterator[Portion | None]:
        yield None
        place = _Place(self._source)
        for share in self._shares:
            whole: dict[tuple[int, int], Any] = {}
            for of_all in share.of_all:
                yield from place.move_to(of_all)
                for number in range(*of_all[1:]):
                    whole[of_all[0], number] = place.next_item()
            own = [(epoch, number) for epoch, low, high in share.ranges for number in range(low, high)]
            if not own:  # a batch of two samples in place of none; see `prefetch.py`
                own = [next(iter(whole))] * min(2, len(whole))
            data = self._source.collated([n for _, n in own], [whole[key] for key in own], share.position.step)
            yield Portion(data, checksum_of(list(whole.values())), place.has_more())


class PartReader(IterableDataset[Any]):
    """Runs in the reading process: parts of the batches of an evaluation, those for which `is_mine(batch, part)`."""

    def __init__(self, source: StreamSource, parts: int, is_mine: Callable[[int, int], bool]) -> None:
        self._source, self._parts, self._is_mine = source, parts, is_mine

    def __iter__(self) -> Iterator[Any]:
        return _with_errors_sent(self._portions())

    def _portions(self) -> Iterator[Portion | None]:
        first = 0
        batches = batches_of(self._source.items(0), self._source.batch, self._parts, drop_last=self._source.drop_last)
        for number, items in enumerate(batches):
            for part in range(self._parts):
                low, high = part_of(len(items), self._parts, part)
                if low < high and self._is_mine(number, part):
                    numbers = list(range(first + low, first + high))
                    yield Portion(self._source.collated(numbers, items[low:high], number))
            first += len(items)


class Counter(IterableDataset[Any]):
    """Runs in the reading process: how many samples the first epoch has, so far and in the end."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[int]:
        count, shown_at = 0, time.monotonic()
        for _ in self._source.items(0):
            count += 1
            if time.monotonic() - shown_at > _TICK_S:
                shown_at = time.monotonic()
                yield count
        yield count


class _Place:
    """Where the reading process is in the stream."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._items: Iterator[Any] = iter(())
        self._epoch, self._number = -1, 0

    def move_to(self, to: Range) -> Iterator[None]:
        """Skip samples until `to` begins, from the start of its epoch if they are past already."""
        epoch, number, _ = to
        if self._epoch != epoch or self._number > number:
            self._items, self._epoch, self._number = self._source.items(epoch), epoch, 0
        shown_at = time.monotonic()
        while self._number < number:
            self.next_item()
            if time.monotonic() - shown_at > _TICK_S:
                shown_at = time.monotonic()
                yield None

    def next_item(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            raise _wrong_length(self._source, self._epoch, f"{self._number:,}") from None
        except Exception as error:
            error.add_note(f"This happened while reading sample {self._number} of epoch {self._epoch}.")
            raise
        self._number += 1
        return item

    def has_more(self) -> bool:
        """Whether samples follow the last one of the epoch, other than those of an incomplete batch."""
        source = self._source
        if self._number != source.count:
            return False
        most = source.batch - 1 if source.drop_last else 0
        rest = sum(1 for _ in itertools.islice(self._items, most + 1))
        self._number += rest
        if rest > most and not source.is_declared:
            raise _wrong_length(source, self._epoch, f"more than {source.count + most:,}")
        return rest > most


class _LoaderInit:
    """Initializes a loader process, which this process starts in turn."""

    def __init__(self, of_script: Callable[[int], None] | None) -> None:
        self._of_script = of_script

    def __call__(self, number: int) -> None:
        die_with_starter()
        if self._of_script is not None:
            self._of_script(number)


def batches_of(items: Iterator[Any], batch: int, parts: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """The items in batches; a last one with fewer items than `parts` is part of the one before it."""
    before: list[Any] = []
    while True:
        found = list(itertools.islice(items, batch))
        if len(found) < batch and drop_last:
            found = []
        if 0 < len(found) < min(batch, parts) and before:
            before, found = before + found, []
        if before:
            yield before
        if not found:
            return
        before = found


def checksum_of(items: list[Any]) -> int:
    """A number that differs, most likely, between different samples; made from some of them."""
    stride = -(-len(items) // _COMPARED_SAMPLES)
    checksum = len(items)
    for item in items[::stride]:
        checksum = _add_to(checksum, item)
    return checksum


def _add_to(checksum: int, item: Any) -> int:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().reshape(-1)[:_COMPARED_NUMBERS].view(torch.uint8).numpy()
    if isinstance(item, np.ndarray):
        return zlib.crc32(item.reshape(-1)[:_COMPARED_NUMBERS].tobytes(), checksum)
    if isinstance(item, Mapping):
        item = list(item.items())
    if isinstance(item, (list, tuple)):
        for part in item[:_COMPARED_NUMBERS]:
            checksum = _add_to(checksum, part)
        return checksum
    if isinstance(item, bytes):
        return zlib.crc32(item[:_COMPARED_NUMBERS], checksum)
    is_plain = isinstance(item, (str, int, float, bool, np.generic))
    # Other objects may show their address.
    return zlib.crc32((str(item)[:_COMPARED_NUMBERS] if is_plain else type(item).__name__).encode(), checksum)


def _with_errors_sent(portions: Iterator[Any]) -> Iterator[Any]:
    """A `DataError` as an item: raised in this process, only its text would get to the worker."""
    try:
        yield from portions
    except DataError as error:
        yield DataError(str(error), code=error.code, **error.facts)


def _wrong_length(source: StreamSource, epoch: int, found: str) -> DataError:
    expected = f"its __len__ says {source.count:,}" if source.is_declared else f"epoch 1 has {source.count:,}"
    if source.drop_last:
        expected += " in whole batches"
    fix = (
        "Let __len__ return the number of samples that __iter__ yields"
        if source.is_declared
        else "Syncline numbers the samples of all epochs alike: give the dataset a __len__, no more than any epoch has"
    )
    return DataError(
        f"{source.name} yields {found} samples in epoch {epoch + 1}, but {expected}. {fix}. If loader processes share "
        "the stream, their parts must add up to that.",
        code="stream-length",
        dataset=source.name,
        epoch=epoch,
        expected=source.count,
        found=found,
    )
