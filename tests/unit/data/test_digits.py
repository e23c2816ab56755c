"""The digits dataset: its fixed split, and what happens without scikit-learn."""

from __future__ import annotations

import gzip
import hashlib
import importlib.machinery
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from syncline.data.digits import Digits
from syncline.errors import DataError


def pretend_sklearn_is_at(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    spec = None
    if folder is not None:
        spec = importlib.machinery.ModuleSpec("sklearn", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_inputs_are_floats_from_0_to_1_in_image_shape():
    data = Digits()
    inputs, targets = data.load(data.locate(None, None), "train")
    assert (inputs.dtype, inputs.shape) == (np.float32, (1437, 1, 8, 8))
    assert (inputs.min(), inputs.max()) == (0.0, 1.0)
    assert (targets.dtype, targets.shape) == (np.int64, (1437,))
    assert inputs.flags.writeable
    assert targets.flags.writeable
    assert data.info(Path("unread")).scale is None


def test_train_and_test_together_are_every_digit_once():
    data = Digits()
    path = data.locate(None, None)
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    rows = []
    for split in ("train", "test"):
        inputs, targets = data.load(path, split)
        rows += [(*image.tolist(), label) for image, label in zip(inputs.reshape(-1, 64) * 16, targets, strict=True)]
    assert sorted(rows) == sorted(tuple(row) for row in table.tolist())


def test_the_split_never_changes():
    """A result on digits is comparable only while this holds: across runs, machines and versions of NumPy."""
    data = Digits()
    inputs, targets = data.load(data.locate(None, None), "test")
    digest = hashlib.sha256((inputs * 16).astype(np.uint8).tobytes() + targets.astype(np.uint8).tobytes()).hexdigest()
    assert digest == "c54b6a96cbce07aa8a9555be86591de728fffd51aca8602ca93943554db82831"


def test_every_class_is_well_represented_in_the_test_split():
    data = Digits()
    _, targets = data.load(data.locate(None, None), "test")
    assert np.bincount(targets, minlength=10).min() >= 25


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    pretend_sklearn_is_at(monkeypatch, None)
    with pytest.raises(DataError, match=r"not installed.*pip install scikit-learn"):
        Digits().locate(None, None)


def test_an_incomplete_scikit_learn_is_named_with_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_sklearn_is_at(monkeypatch, tmp_path)
    with pytest.raises(DataError, match=r"digits\.csv\.gz, but there is no such file\. Reinstall"):
        Digits().locate(None, None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"not gzip", "cannot be read as digits"),
        (gzip.compress(b"1,2,3\n4,5,6\n" * 50)[:-12], "cannot be read as digits"),
        (gzip.compress(b"1,two,3\n"), "cannot be read as digits"),
        (gzip.compress(b"1,2,3\n4,5,6\n"), r"shape \(2, 3\)"),
        (gzip.compress((b"0.5," * 64 + b"1\n") * 1797), "cannot be read as digits"),
        (gzip.compress((b"5," * 64 + b"10\n") * 1797), "labels other than 0 to 9"),
    ],
    ids=["not-gzip", "truncated", "not-numbers", "wrong-shape", "fractions", "wrong-labels"],
)
def test_a_corrupt_file_gives_a_data_error_that_names_it(tmp_path: Path, content: bytes, complaint: str):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        Digits().load(path, "train")
    assert str(path) in str(caught.value)
    assert "Reinstall scikit-learn" in str(caught.value)
