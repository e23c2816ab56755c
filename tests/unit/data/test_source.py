"""Where samples come from: arrays, Datasets, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from syncline.data.source import ArraySource, DatasetSource, as_source, inputs_only
from syncline.errors import ConfigError, DataError


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert type(index) is int, "a Dataset is asked for plain integers"
        return torch.tensor([index, index**2]), index % 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("indices", [[3, 0, 3], np.array([3, 0, 3]), np.array([3, 0, 3], np.int32), (3, 0, 3)])
def test_arrays_give_the_rows_asked_for_in_that_order(indices):
    source = ArraySource(torch.arange(10).view(5, 2), np.arange(5) * 10)
    inputs, targets = source.fetch(indices)
    assert len(source) == 5
    assert inputs.tolist() == [[6, 7], [0, 1], [6, 7]]
    assert targets.tolist() == [30, 0, 30]


def test_arrays_are_not_copied_but_batches_are():
    images = np.zeros((4, 2))
    source = ArraySource(images)
    images[1] = 5.0
    (batch,) = source.fetch([1])
    assert batch.tolist() == [[5.0, 5.0]]
    batch.zero_()
    assert images[1].tolist() == [5.0, 5.0]


def test_no_indices_give_an_empty_batch_of_the_right_shape():
    inputs, targets = ArraySource(torch.zeros(5, 3, 2), torch.zeros(5)).fetch([])
    assert inputs.shape == (0, 3, 2)
    assert targets.shape == (0,)


def test_a_scale_turns_bytes_into_normalized_floats_in_the_first_array_only():
    images = torch.arange(0, 256, 51, dtype=torch.uint8).view(6, 1)
    inputs, targets = ArraySource(images, torch.arange(6), scale=(0.1307, 0.3081)).fetch(range(6))
    expected = (images.double() / 255 - 0.1307) / 0.3081
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=1e-6)
    assert targets.tolist() == list(range(6))
    assert images.dtype == torch.uint8


def test_an_index_outside_the_data_is_an_error():
    with pytest.raises((IndexError, RuntimeError)):
        ArraySource(torch.zeros(5)).fetch([5])


def test_arrays_of_different_lengths_are_refused_with_both_lengths():
    with pytest.raises(DataError, match=r"The arrays have 5, 4 samples"):
        ArraySource(torch.zeros(5, 2), torch.zeros(4))


def test_no_array_at_all_is_refused():
    with pytest.raises(ConfigError, match="needs at least one array"):
        ArraySource()


@pytest.mark.parametrize("number", [torch.tensor(3.0), np.array(3)])
def test_a_single_number_is_refused(number):
    with pytest.raises(DataError, match=r"single number"):
        as_source(number)


def test_a_dataset_gives_its_items_collated():
    source = DatasetSource(Squares())
    inputs, targets = source.fetch(np.array([3, 1]))
    assert len(source) == 10
    assert inputs.tolist() == [[3, 9], [1, 1]]
    assert targets.tolist() == [1, 1]


def test_a_dataset_can_have_a_collate_function_of_its_own():
    assert DatasetSource(Squares(), lambda items: len(items)).fetch([1, 2, 3]) == 3


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (torch.zeros(3), ArraySource),
        (np.zeros(3), ArraySource),
        ((torch.zeros(3), np.zeros(3)), ArraySource),
        ([torch.zeros(3), torch.zeros(3)], ArraySource),
        (TensorDataset(torch.zeros(3), torch.zeros(3)), ArraySource),
        (Squares(), DatasetSource),
        ([(1, 2), (3, 4)], DatasetSource),
    ],
)  # fmt: skip
def test_what_a_user_may_pass_becomes_the_right_source(data, kind):
    assert type(as_source(data)) is kind


def test_a_source_is_taken_as_it_is():
    class Own:
        def __len__(self) -> int:
            return 1

        def fetch(self, indices: Any) -> Any:
            return indices

    for source in (ArraySource(torch.zeros(3)), DatasetSource(Squares()), Own()):
        assert as_source(source) is source


@pytest.mark.parametrize("data", [Stream(), StreamOfKnownLength(), iter([1]), DataLoader(Squares()), {1, 2}])
def test_data_that_can_only_be_iterated_is_rejected(data):
    with pytest.raises(ConfigError) as caught:
        as_source(data)
    assert caught.value.code == "not-indexable"
    assert caught.value.facts["type"] == type(data).__name__


@pytest.mark.parametrize("data", [None, 3, object()])
def test_an_object_that_is_not_data_is_rejected(data):
    with pytest.raises(ConfigError) as caught:
        as_source(data)
    assert caught.value.code == "unsupported-data"
    assert caught.value.facts["type"] == type(data).__name__


class OwnSource:
    def __len__(self) -> int:
        return 4

    def fetch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.as_tensor(indices), torch.zeros(len(indices))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ArraySource(np.array([[0], [255]], np.uint8), np.arange(2), scale=(0.5, 0.5)), [[1.0], [-1.0]]),
        (DatasetSource(Squares()), [[1, 1], [0, 0]]),
        (OwnSource(), [1, 0]),
    ],
)
def test_the_inputs_of_a_source_can_be_had_without_the_targets(source: Any, expected: list[Any]):
    inputs = inputs_only(source)
    assert len(inputs) == len(source)
    batch = inputs.fetch([1, 0])
    (found,) = batch if isinstance(batch, tuple) else (batch,)
    assert found.tolist() == expected
