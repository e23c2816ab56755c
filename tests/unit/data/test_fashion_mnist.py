"""Fashion-MNIST: in MNIST's format, but never mistaken for it."""

from __future__ import annotations

import gzip
import hashlib
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest

from syncline.data import fashion_mnist
from syncline.data.fashion_mnist import FashionMnist
from syncline.data.idx import IdxFile
from syncline.errors import DataError


def small_files() -> dict[str, bytes]:
    files = {}
    for prefix, count in (("train", 4), ("t10k", 2)):
        files[f"{prefix}-images-idx3-ubyte"] = struct.pack(">4I", 2051, count, 28, 28) + bytes([count]) * count * 784
        files[f"{prefix}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, count) + bytes(range(count))
    return files


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian package with small files that nobody else hands out; its folder."""
    inside = tmp_path / "deb" / "usr" / "share" / "datasets" / "fashion-mnist"
    inside.mkdir(parents=True)
    for name, data in small_files().items():
        (inside / f"{name}.gz").write_bytes(gzip.compress(data))

    @contextmanager
    def package(name, progress):
        assert name == "dataset-fashion-mnist"
        yield tmp_path / "deb"

    files = [IdxFile(name=n, md5_packed="", md5_unpacked=hashlib.md5(d).hexdigest()) for n, d in small_files().items()]
    monkeypatch.setattr(fashion_mnist, "debian_package", package)
    monkeypatch.setattr(FashionMnist, "mirrors", ())
    monkeypatch.setattr(FashionMnist, "files", tuple(files))
    monkeypatch.setattr(FashionMnist, "elsewhere", ("FashionMNIST/raw",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SYNCLINE_DATA", raising=False)
    return inside


def test_the_debian_package_fills_the_cache(tmp_path: Path, debian: Path):
    found = FashionMnist().locate(None, None)
    assert found == tmp_path / "cache" / "syncline" / "data" / "fashion-mnist"
    info = FashionMnist().info(found)
    assert (info.name, info.train_samples, info.test_samples, info.classes) == ("fashion-mnist", 4, 2, 10)
    assert info.class_names is not None
    assert info.class_names[9] == "Ankle boot"
    assert FashionMnist().load(found, "train")[1].tolist() == [0, 1, 2, 3]


def test_what_the_package_has_is_checked(debian: Path):
    (debian / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(DataError, match=r"apt-get download .*: t10k-labels-idx1-ubyte in the package has the md5"):
        FashionMnist().locate(None, None)
    (debian / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz cannot be decompressed"):
        FashionMnist().locate(None, None)


def test_mnists_files_in_the_folder_a_user_names_are_not_taken_for_fashion(tmp_path: Path, debian: Path):
    for name, data in small_files().items():
        (tmp_path / name).write_bytes(data)
    assert FashionMnist().locate(tmp_path, None) != tmp_path
    (tmp_path / "fashion-mnist").mkdir()
    for name, data in small_files().items():
        (tmp_path / "fashion-mnist" / name).write_bytes(data)
    assert FashionMnist().locate(tmp_path, None) == tmp_path / "fashion-mnist"
