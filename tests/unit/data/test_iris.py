"""Iris: its fixed split and its standardized features."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from syncline.data.iris import Iris
from syncline.errors import DataError


def test_the_training_features_have_mean_0_and_deviation_1():
    data = Iris()
    inputs, targets = data.load(data.locate(None, None), "train")
    assert (inputs.dtype, inputs.shape, targets.dtype) == (np.float32, (120, 4), np.int64)
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(inputs.std(axis=0), 1, rtol=1e-6)


def test_the_test_features_are_scaled_by_the_numbers_of_the_training_features():
    data = Iris()
    path = data.locate(None, None)
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    train, _ = data.load(path, "train")
    test, _ = data.load(path, "test")
    both = np.concatenate([train, test])
    assert len(both) == 150
    for column in range(4):  # a straight line leads from what is in the file to what is loaded
        raw, scaled = np.sort(table[:, column]), np.sort(both[:, column])
        slope, offset = np.polyfit(raw, scaled, 1)
        np.testing.assert_allclose(slope * raw + offset, scaled, atol=1e-5)


def test_the_split_never_changes():
    data = Iris()
    _, targets = data.load(data.locate(None, None), "test")
    digest = hashlib.sha256(targets.astype(np.uint8).tobytes()).hexdigest()
    assert digest == "4d27726dd0c3a1e8f38403c66bd37c1b1154e6a4661200dc19959ba5bb00ad77"
    assert np.bincount(targets).min() >= 8


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "cannot be read as iris|shape"),
        ("head\n1,two,3,4,5\n", "cannot be read as iris"),
        ("head\n1,2,3\n", "shape"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_corrupt_file_is_named(tmp_path: Path, content: str, complaint: str):
    path = tmp_path / "iris.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=complaint) as caught:
        Iris().load(path, "train")
    assert str(path) in str(caught.value)
