"""The fingerprint of training data: the same for the same data, and another one where a change can be seen cheaply."""

from __future__ import annotations

import numpy as np
import torch

from syncline.task import Task


def fingerprint(data: object) -> str:
    return Task(model="mlp", data=data).facts().data_fingerprint


def arrays(count: int = 100, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs.sum(1) > 0).long()


def test_the_same_arrays_have_the_same_fingerprint():
    assert fingerprint(arrays()) == fingerprint(arrays())
    assert fingerprint(arrays()[0].numpy()) == fingerprint(arrays()[0].numpy().copy())


def test_other_values_samples_shapes_and_types_have_another_one():
    inputs, targets = arrays()
    others = [arrays(99), arrays(seed=1), (inputs.double(), targets), (inputs.reshape(100, 2, 2), targets)]
    found = {fingerprint(data) for data in [(inputs, targets), *others]}
    assert len(found) == 5


def test_what_cannot_be_sampled_counts_by_its_shape():
    assert fingerprint(torch.eye(10).to_sparse()) == fingerprint((2 * torch.eye(10)).to_sparse())
    assert fingerprint(np.zeros((0, 4))) != fingerprint(np.zeros((1, 4)))


def test_the_samples_of_a_dataset_are_not_fetched():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            raise AssertionError("it may be slow or random")

    assert fingerprint(Noisy()) == fingerprint(Noisy())
