"""Samples that do not fit together, and data whose length is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from syncline.data.assignment import Position
from syncline.data.length import length_of
from syncline.data.order import Share
from syncline.data.prefetch import fetch
from syncline.data.source import DatasetSource, inputs_only
from syncline.errors import DataError


class Data(torch.utils.data.Dataset[Any]):
    """Sample 3 is unlike the others."""

    def __init__(self, odd: Any) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == 3 else (torch.full((4,), float(index)), index % 2)


def share(*indices: int) -> Share:
    return Share(Position(), np.array(indices), len(indices), (), Position())


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize(
    ("odd", "code"),
    [
        (None, "sample-is-none"),
        ((None, 1), "sample-is-none"),
        ((torch.zeros(5), 1), "ragged-samples"),
        ((torch.zeros(4), 1, 2), "ragged-samples"),
        (torch.zeros(4), "ragged-samples"),
        ((torch.zeros(4), "one"), "ragged-samples"),
    ],
)
def test_the_sample_that_does_not_fit_is_named(odd, code, loaders):
    with pytest.raises(DataError) as caught:
        list(fetch(DatasetSource(Data(odd)), iter([share(0, 1, 2), share(6, 5, 3, 7)]), loaders=loaders, seed=0))
    assert caught.value.code == code
    assert caught.value.facts["sample"] == 3
    if code == "ragged-samples":
        assert caught.value.facts["other_sample"] == 6


def test_the_sample_is_named_where_only_inputs_are_used_as_well():
    with pytest.raises(DataError) as caught:
        inputs_only(DatasetSource(Data((torch.zeros(5), 1)))).fetch([0, 1, 3])
    assert caught.value.facts["sample"] == 3


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_exception_of_the_users_own_collate_function_stays_theirs(loaders):
    def collate(items: list[Any]) -> Any:
        raise ZeroDivisionError("the user's own mistake")

    with pytest.raises(ZeroDivisionError):
        list(fetch(DatasetSource(Data(None), collate), iter([share(0, 3)]), loaders=loaders, seed=0))


@pytest.mark.parametrize("length", [-1, "4", 2.5, None, 2**70])
def test_a_length_that_is_none_is_refused(length):
    class Odd:
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> int:
            return index

    for measure in (length_of, lambda data: len(DatasetSource(data))):
        with pytest.raises(DataError) as caught:
            measure(Odd())
        assert (caught.value.code, caught.value.facts["type"]) == ("invalid-length", "Odd")


def test_an_exception_in_the_users_own_length_stays_theirs():
    class Odd:
        def __len__(self) -> int:
            raise ValueError("the user's own mistake")

    with pytest.raises(ValueError, match="own mistake") as caught:
        length_of(Odd())
    assert not isinstance(caught.value, DataError)
