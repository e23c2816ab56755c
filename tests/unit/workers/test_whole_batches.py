"""Dividing whole batches, also those with flattened tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import DataError
from syncline.workers.own_loop.whole_batches import is_list_of_batches, joined, part_of, size_of


@given(time=st.integers(1, 5), columns=st.integers(2, 7), cut=st.integers(1, 6))
def test_parts_of_a_batch_joined_are_the_batch(time: int, columns: int, cut: int) -> None:
    inputs, cut = torch.arange(time * columns).view(time, columns), min(cut, columns - 1)
    batch = {"x": inputs, "y": (inputs * 2).view(-1)}
    parts = [part_of(batch, numbers, 1) for numbers in (np.arange(cut), np.arange(cut, columns))]
    assert all(torch.equal(part["y"], part["x"].reshape(-1) * 2) for part in parts)
    whole = joined(parts, 1)
    assert all(torch.equal(whole[name], batch[name]) for name in batch)


def test_samples_that_do_not_follow_each_other_are_taken_from_flattened_targets() -> None:
    inputs = torch.arange(12).view(3, 4)
    x, y = part_of((inputs, inputs.reshape(-1)), np.array([0, 3]), 1)
    assert torch.equal(y, x.reshape(-1))
    assert x.tolist() == [[0, 3], [4, 7], [8, 11]]


def test_a_tensor_that_is_no_flattened_one_is_refused() -> None:
    with pytest.raises(DataError) as error:
        size_of((torch.zeros(3, 4), torch.zeros(11)), 1)
    assert error.value.code == "batch-shape"


def test_parts_of_different_lengths_are_not_joined() -> None:
    with pytest.raises(DataError, match="replace-only"):
        joined([(torch.zeros(3, 2), torch.zeros(6)), (torch.zeros(2, 2), torch.zeros(4))], 1)


def test_tensors_are_one_batch_and_tuples_are_many() -> None:
    x = torch.zeros(2)
    assert is_list_of_batches([(x, x), (x, x)])
    assert is_list_of_batches(batch for batch in [x, x])
    assert not is_list_of_batches([x, x])
    assert not is_list_of_batches((x, x))
    assert not is_list_of_batches([])
