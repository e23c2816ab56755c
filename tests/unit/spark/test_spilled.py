"""Rows that were written in parts are read by their numbers, as if they were one array."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from syncline.data.source import as_source
from syncline.errors import DataError
from syncline.spark.spilled import PartWriter, SpilledFile, SpilledFrame


def write(path: Path, *batches: tuple[np.ndarray, np.ndarray]) -> SpilledFile:
    writer = PartWriter(path)
    for features, labels in batches:
        writer.write(features, labels)
    writer.close()
    return SpilledFile(str(path), writer.rows)


def rows(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(first, first + count)
    return np.stack([numbers, numbers + 0.5], 1).astype(np.float32), numbers


@pytest.fixture
def frame(tmp_path) -> SpilledFrame:
    parts = (write(tmp_path / "a", rows(0, 5), rows(5, 3)), write(tmp_path / "b", rows(8, 4)))
    return SpilledFrame(parts, (2,))


def test_any_rows_in_any_order_are_what_was_written(frame):
    assert len(frame) == 12
    assert as_source(frame) is frame
    order = np.random.RandomState(0).permutation(12)
    features, labels = frame.fetch(order)
    assert labels.tolist() == order.tolist()
    assert features.tolist() == [[n, n + 0.5] for n in order]
    assert frame.fetch([3, 3])[1].tolist() == [3, 3]
    assert frame.fetch([])[0].shape == (0, 2)


def test_it_travels_without_what_it_has_opened(frame):
    frame.fetch([0])
    again = pickle.loads(pickle.dumps(frame))
    assert again == frame
    assert again.fetch([11])[1].tolist() == [11]
    assert len(pickle.dumps(frame)) < 2000


def test_features_are_given_in_the_shape_that_is_asked_for_and_bytes_as_parts_of_one(tmp_path):
    pixels = np.array([[0, 51, 255, 0]], np.uint8)
    part = write(tmp_path / "a", (pixels, np.array([1.5], np.float32)))
    features, labels = SpilledFrame((part,), (1, 2, 2), (1,)).fetch([0])
    assert features.shape == (1, 1, 2, 2)
    assert torch.allclose(features.flatten(), torch.tensor([0.0, 0.2, 1.0, 0.0]))
    assert labels.tolist() == [[1.5]]


def test_labels_of_several_numbers_keep_their_shape(tmp_path):
    part = write(tmp_path / "a", (np.zeros((2, 1), np.float32), np.array([[1, 2, 3], [4, 5, 6]], np.float32)))
    assert SpilledFrame((part,), (1,)).fetch([1])[1].tolist() == [[4, 5, 6]]


def test_a_file_that_is_not_seen_is_named_with_the_setting_to_change(frame):
    Path(frame.parts[1].path).unlink()
    with pytest.raises(DataError, match=r"cannot read .*/b, .*all hosts share.*spill_dir="):
        frame.fetch([0])


def test_what_is_abandoned_leaves_no_file(tmp_path):
    writer = PartWriter(tmp_path / "a")
    writer.write(*rows(0, 2))
    with pytest.raises(DataError, match="shape 2 and others of 3"):
        writer.write(np.zeros((1, 3), np.float32), np.zeros(1))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
