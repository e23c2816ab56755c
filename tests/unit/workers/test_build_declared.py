"""What a declared model learns from data that is given as arrays or as a Dataset."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

import syncline
from syncline.errors import ConfigError
from syncline.task import Task
from syncline.workers.build import build_model, build_sources


class OwnTokens(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), index), torch.zeros(())


def built(layers: list[str], data: object) -> torch.nn.Module:
    task = Task(model=syncline.declared(layers), data=data)
    return build_model(task, build_sources(task)[0], seed=0)


def test_shape_and_classes_are_seen_in_arrays():
    model = built(["linear('classes')"], (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 4, 1])))
    assert model[0].weight.shape == (5, 4)


def test_tokens_and_the_tokens_that_follow_them_have_one_vocabulary():
    tokens = torch.tensor([[0, 3, 1], [2, 0, 3]])
    model = built(["embedding(8)", "linear('vocabulary')"], (tokens, tokens + 1))
    assert model[0].weight.shape == (5, 8)
    assert model[1].weight.shape == (5, 8)


def test_tokens_of_a_dataset_need_the_size_of_their_vocabulary():
    data = OwnTokens()
    with pytest.raises(ConfigError, match="num_embeddings"):
        built(["embedding(embedding_dim=8)"], data)
    assert built(["embedding(10, 8)", "flatten", "linear(1)"], data)[2].weight.shape == (1, 24)
