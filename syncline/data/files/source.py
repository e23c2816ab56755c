"""Samples from files, by index.

Here: `FileSource`, a `Source` (`data/source.py`) that reads only the row groups with the requested samples and caches
decoded groups; and `RowMap`, which maps an index to a file, a row group and a row. A row group is read at once: a row
group of Parquet, a record batch of Arrow, or a whole file. Not here: the formats (one file each), and the order of
samples (`data/order.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from syncline.data.files.find import format_named
from syncline.data.files.format import Reader
from syncline.data.files.manifest import FileFacts, Manifest
from syncline.data.files.store import Store
from syncline.data.order import hold_out
from syncline.data.source import Indices

_Arrays = tuple[np.ndarray, ...]


def sources(found: Manifest) -> tuple[FileSource, FileSource | None]:
    """The training data and the test data, if any, of a manifest."""
    data_format = format_named(found.format)
    store = Store(found.location, found.options.storage)
    reader = data_format.reader(found, store)
    if found.held_out:
        kept, held = hold_out(found.options.split_seed, found.rows("train"), found.held_out)
        return FileSource(found, found.train, reader, kept), FileSource(found, found.train, reader, held)
    train = FileSource(found, found.train, reader)
    if not found.test:
        return train, None
    test_store = Store(found.test_location, found.options.storage) if found.test_location else store
    return train, FileSource(found, found.test, data_format.reader(found, test_store))


class FileSource:
    """The rows of some files, or only the `kept` ones."""

    def __init__(
        self, manifest: Manifest, files: Sequence[FileFacts], reader: Reader, kept: np.ndarray | None = None
    ) -> None:
        self._manifest, self._files, self._reader = manifest, tuple(files), reader
        self._row_map = RowMap(files, kept)
        self._decoded: OrderedDict[tuple[int, int], _Arrays] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = threading.Lock()  # the prefetch thread and the worker may fetch at the same time
        self.groups_read = 0
        """The number of group reads so far, repeated reads included."""

    def __len__(self) -> int:
        return len(self._row_map)

    @property
    def group_sizes(self) -> np.ndarray | None:
        """The number of samples in each group, if shuffling is limited to a few groups at a time."""
        return self._row_map.group_sizes if self._manifest.shuffles_groups else None

    @property
    def window(self) -> int:
        """How many groups are shuffled together."""
        return self._manifest.options.window

    @property
    def scale(self) -> tuple[float, float] | None:
        """The (mean, std) that inputs which are bytes are scaled with."""
        return self._manifest.options.scale if self._manifest.is_bytes else None

    def fetch(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        """The samples at `indices`, ready for a model."""
        tensors = [torch.from_numpy(part) for part in self.raw(indices)]
        if self.scale is not None:
            mean, deviation = self.scale
            tensors[0] = tensors[0].float().mul_(1.0 / (255.0 * deviation)).sub_(mean / deviation)
        return tuple(tensors)

    def raw(self, indices: Indices) -> tuple[np.ndarray, ...]:
        """The samples at `indices` as stored; bytes are not scaled."""
        wanted = np.asarray(indices, np.int64)
        out: list[np.ndarray] = []
        with self._lock:
            for file, group, here, rows in self._row_map.by_group(wanted):
                parts = self._rows(file, group, rows)
                out = out or [np.empty((len(wanted), *part.shape[1:]), part.dtype) for part in parts]
                for whole, part in zip(out, parts, strict=True):
                    whole[here] = part
        return tuple(out)

    def _rows(self, file: int, group: int, rows: np.ndarray) -> _Arrays:
        if not self._reader.reads_whole_groups:
            return self._reader.read(self._files[file], group, rows)
        return tuple(part[rows] for part in self._group(file, group))

    def _group(self, file: int, group: int) -> _Arrays:
        key = (file, group)
        if key not in self._decoded:
            arrays = self._reader.read(self._files[file], group, None)
            self.groups_read += 1
            self._decoded[key] = arrays
            self._decoded_bytes += sum(a.nbytes for a in arrays)
            # Never fewer than `window`, or the same groups would be read again and again.
            fewest = self.window if self._manifest.shuffles_groups else 1
            while self._decoded_bytes > self._manifest.options.cache_mb * 1e6 and len(self._decoded) > fewest:
                _, dropped = self._decoded.popitem(last=False)
                self._decoded_bytes -= sum(a.nbytes for a in dropped)
        self._decoded.move_to_end(key)
        return self._decoded[key]


class RowAddress(NamedTuple):
    """The location of a sample."""

    file: int
    group: int
    row: int


class RowMap:
    """The rows of some files, numbered from the first of the first file to the last of the last.

    `kept` are the row numbers in use, ascending, if not all are: sample i is then row kept[i].
    """

    def __init__(self, files: Sequence[FileFacts], kept: np.ndarray | None = None) -> None:
        self._kept = kept
        self._groups = [(file, group) for file, facts in enumerate(files) for group in range(len(facts.group_rows))]
        sizes = [rows for facts in files for rows in facts.group_rows]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))])

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._kept is None else len(self._kept)

    @property
    def group_sizes(self) -> np.ndarray:
        """The number of samples in each group, in order."""
        if self._kept is None:
            return np.diff(self._starts)
        return np.bincount(self._group_of(self._kept), minlength=len(self._groups))

    def address_of(self, index: int) -> RowAddress:
        row = int(index if self._kept is None else self._kept[index])
        group = int(self._group_of(np.asarray([row]))[0])
        return RowAddress(*self._groups[group], row - int(self._starts[group]))

    def by_group(self, indices: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """(file, group, positions in `indices`, rows) for each group with some of the samples."""
        rows = indices if self._kept is None else self._kept[indices]
        groups = self._group_of(rows)
        for group in np.unique(groups):
            here = np.flatnonzero(groups == group)
            yield *self._groups[group], here, rows[here] - self._starts[group]

    def _group_of(self, rows: np.ndarray) -> np.ndarray:
        # side=right, because an empty group starts where the next one does.
        return np.searchsorted(self._starts, rows, side="right") - 1
