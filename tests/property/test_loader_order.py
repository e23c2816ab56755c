"""The order of a DataLoader with any sampler, divided among any number of workers."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from syncline.data.assignment import Position
from syncline.data.loader_order import order_of

COUNT = 37
DATA = TensorDataset(torch.arange(COUNT))


def batches_of(loader: DataLoader[tuple[torch.Tensor, ...]], workers: int, epochs: int = 2) -> list[list[int]]:
    """What the workers together get in each step."""
    order = order_of(loader, seed=3)
    of_workers = [order.shares(Position(), rank=rank, size=workers, epochs=epochs) for rank in range(workers)]
    steps = list(zip(*of_workers, strict=True))
    for step in steps:
        assert {share.batch for share in step} == {sum(len(share.indices) for share in step)}
    return [[int(i) for share in step for i in share.indices] for step in steps]


@st.composite
def samplers(draw: st.DrawFn) -> tuple[object, int]:
    """A sampler and how many samples it draws in an epoch."""
    number = draw(st.integers(1, 60))
    return draw(
        st.sampled_from(
            [
                (RandomSampler(DATA, replacement=True, num_samples=number), number),
                (WeightedRandomSampler(torch.rand(COUNT) + 0.1, number), number),
                (SubsetRandomSampler(range(min(number, COUNT))), min(number, COUNT)),
                (RandomSampler(DATA, generator=torch.Generator().manual_seed(number)), COUNT),
            ]
        )
    )


@given(sampler=samplers(), batch=st.integers(1, 12), workers=st.integers(1, 5), drops=st.booleans())
def test_every_sampler_gives_the_same_batches_to_any_number_of_workers(sampler, batch, workers, drops):
    found, number = sampler
    if drops and number < batch:
        return
    loader = DataLoader(DATA, batch_size=batch, sampler=found, drop_last=drops)
    batches = batches_of(loader, workers)
    assert batches == batches_of(loader, 1)
    assert sum(map(len, batches)) == 2 * (number - number % batch if drops else number)
    assert all(0 <= i < COUNT for one in batches for i in one)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), workers=st.integers(1, 5))
def test_batches_of_different_sizes_stay_whole(sizes, workers):
    ends = np.cumsum(sizes)
    batches = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    data = TensorDataset(torch.arange(int(ends[-1])))
    assert batches_of(DataLoader(data, batch_sampler=batches), workers, epochs=1) == batches


def test_drawing_leaves_the_scripts_own_random_numbers_alone():
    loader = DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler(torch.ones(COUNT), 20))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = batches_of(loader, 2)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert first == batches_of(loader, 2), "the seed and the epoch decide, nothing else"
    assert first[:5] != first[5:], "each epoch has an order of its own"
