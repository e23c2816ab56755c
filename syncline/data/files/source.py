"""Samples by number out of files.

Here: `FileSource`, a `Source` (`data/source.py`) that reads only the groups of rows that hold the samples asked for,
and keeps the last few decoded ones. Not here: the formats (one file each), or the numbers (`layout.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from syncline.data.files.find import format_named
from syncline.data.files.format import Reader
from syncline.data.files.layout import Layout
from syncline.data.files.store import Store
from syncline.data.files.survey import FileFacts, Survey
from syncline.data.order import hold_out
from syncline.data.source import Indices

__all__ = ["FileSource", "sources"]

_Arrays = tuple[np.ndarray, ...]


def sources(found: Survey) -> tuple[FileSource, FileSource | None]:
    """The training data and the test data, if any, of a survey."""
    data_format = format_named(found.format)
    store = Store(found.location, found.options.storage)
    reader = data_format.reader(found, store)
    if found.held_back:
        kept, held = hold_out(found.options.split_seed, found.rows("train"), found.held_back)
        return FileSource(found, found.train, reader, kept), FileSource(found, found.train, reader, held)
    train = FileSource(found, found.train, reader)
    if not found.test:
        return train, None
    test_store = Store(found.test_location, found.options.storage) if found.test_location else store
    return train, FileSource(found, found.test, data_format.reader(found, test_store))


class FileSource:
    """The rows of some files, or those of them that are `kept`."""

    def __init__(
        self, survey: Survey, files: Sequence[FileFacts], reader: Reader, kept: np.ndarray | None = None
    ) -> None:
        self._survey, self._files, self._reader = survey, tuple(files), reader
        self._layout = Layout(files, kept)
        self._decoded: OrderedDict[tuple[int, int], _Arrays] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = threading.Lock()  # a prefetching thread and the worker itself may ask at the same time
        self.groups_read = 0
        """How many groups were read so far, again or for the first time."""

    def __len__(self) -> int:
        return len(self._layout)

    @property
    def group_sizes(self) -> np.ndarray | None:
        """How many samples are in each group, if only a few groups are to be mixed at a time."""
        return self._layout.group_sizes if self._survey.shuffles_groups else None

    @property
    def window(self) -> int:
        """How many groups are mixed at a time."""
        return self._survey.options.window

    def fetch(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        """The samples at `indices`, ready for a model."""
        tensors = [torch.from_numpy(part) for part in self.raw(indices)]
        if self._survey.is_bytes:
            mean, deviation = self._survey.options.scale
            tensors[0] = tensors[0].float().mul_(1.0 / (255.0 * deviation)).sub_(mean / deviation)
        return tuple(tensors)

    def raw(self, indices: Indices) -> tuple[np.ndarray, ...]:
        """The samples at `indices` as they are in the files, bytes as bytes."""
        wanted = np.asarray(indices, np.int64)
        out: list[np.ndarray] = []
        with self._lock:
            for file, group, here, rows in self._layout.by_group(wanted):
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
            # Never fewer than are mixed at a time: they would be read over and over.
            fewest = self.window if self._survey.shuffles_groups else 1
            while self._decoded_bytes > self._survey.options.cache_mb * 1e6 and len(self._decoded) > fewest:
                _, dropped = self._decoded.popitem(last=False)
                self._decoded_bytes -= sum(a.nbytes for a in dropped)
        self._decoded.move_to_end(key)
        return self._decoded[key]
