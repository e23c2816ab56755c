"""Converting data, by name or in files, to another format.

Here: `Readable`, which reads all samples as they are stored, and `convert`. Not here: writing (`writers.py`), and
reading (one module per format).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncline.config.spec import Spec
from syncline.data.files.find import scan
from syncline.data.files.manifest import Manifest
from syncline.data.files.options import FileOptions
from syncline.data.files.source import sources
from syncline.data.files.writers import WRITERS
from syncline.data.named import DataInfo, Progress, Split, named, names
from syncline.errors import DataError, UnknownName

_BATCH = 1024
Raw = Callable[[Split, np.ndarray], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Readable:
    """Data that was found, with a function that reads its samples as they are stored."""

    info: DataInfo
    where: str
    raw: Raw
    manifest: Manifest | None = None

    def batches(self, split: Split) -> Iterator[tuple[np.ndarray, ...]]:
        """All samples of a split, in batches."""
        count = self.info.train_samples if split == "train" else self.info.test_samples
        for low in range(0, count, _BATCH):
            yield self.raw(split, np.arange(low, min(low + _BATCH, count)))


def readable(data: Spec, data_dir: Path | None = None, progress: Progress | None = None) -> Readable:
    """The data that a user names, found or downloaded."""
    if data.name not in names():
        found = scan(data.name, FileOptions.of(data.options))
        of_split = dict(zip(("train", "test"), sources(found), strict=True))

        def from_files(split: Split, indices: np.ndarray) -> tuple[np.ndarray, ...]:
            source = of_split[split]
            assert source is not None
            return source.raw(indices)

        return Readable(found.info(found.location), found.location, from_files, found)
    data_set = named(data.name, **data.options)
    path = data_set.locate(data_dir, progress)
    loaded: dict[str, Any] = {}

    def from_named(split: Split, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        if split not in loaded:
            loaded[split] = data_set.load(path, split)
        return tuple(part[indices] for part in loaded[split])

    return Readable(data_set.info(path), str(path), from_named)


def convert(data: Readable, target: Path, to: str, report: Callable[[str, int, int], None]) -> None:
    """Write all samples of `data` into the folder `target`, which appears only when it is complete.

    `report` is called with the progress: split, samples done, samples in total.
    """
    if to not in WRITERS:
        raise UnknownName.among("format", to, WRITERS)
    if data.info.vocabulary is not None:
        raise DataError(f"{data.info.name} is text in windows, which no format can hold. It cannot be converted.")
    if target.exists():
        raise DataError(
            f"{target} already exists. Choose another name, or delete it.", code="target-exists", path=str(target)
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.mkdir(parents=True)
        _write(data, temporary, to, report)
        temporary.rename(target)
    except OSError as error:
        raise DataError(f"{target} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(data: Readable, folder: Path, to: str, report: Callable[[str, int, int], None]) -> None:
    counts: dict[Split, int] = {"train": data.info.train_samples, "test": data.info.test_samples}
    for split, count in counts.items():
        if not count:
            continue
        writer = WRITERS[to](folder, split, data.info)
        done = 0
        try:
            for batch in data.batches(split):
                if len(batch) < 2:
                    raise DataError(f"{data.where} has no labels, but every output format needs them.")
                writer.write(batch[0], batch[1])
                done += len(batch[0])
                report(split, done, count)
        finally:
            writer.close()
