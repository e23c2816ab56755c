"""Fashion-MNIST: 70,000 images of clothes, in MNIST's format and harder.

Here: where its files are published. Not here: the format, which it shares with MNIST (`idx.py`). (H. Xiao, K. Rasul and
R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.)
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from syncline.data.idx import IdxImages, four_files
from syncline.data.mirrors import Mirror
from syncline.data.named import Progress
from syncline.data.package_indexes import debian_package
from syncline.errors import DataError

DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
"""Where that package has the files. Debian strips their gzip headers, so only the md5 of the unpacked bytes holds."""


class FashionMnist(IdxImages):
    """Inputs are uint8 of shape (1, 28, 28); `DataInfo.scale` says how they become floats."""

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    files = four_files(
        train_images=("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        train_labels=("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        test_images=("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        test_labels=("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    )
    mirrors = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
    scale = (0.2860, 0.3530)
    class_names = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    # Not the folder that a user names itself: its files are called like MNIST's.
    elsewhere = ("FashionMNIST/raw", DEBIAN_FOLDER)
    advice = f"sudo apt-get install {DEBIAN_PACKAGE}     # its files are found where Debian puts them"

    def from_registry(self) -> Mirror:
        return Mirror(fetch=self._from_debian, label=f"apt-get download {DEBIAN_PACKAGE}")

    def _from_debian(self, names: Sequence[str], folder: Path, progress: Progress | None) -> None:
        with debian_package(DEBIAN_PACKAGE, progress) as root:
            self.place_checked(names, folder, lambda name: _unpacked(root / DEBIAN_FOLDER.lstrip("/") / f"{name}.gz"))


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the package's {path.name} cannot be decompressed: {error}.") from error
