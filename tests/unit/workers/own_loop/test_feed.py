"""Batches that a function draws: the same for any number of workers, and nothing else is disturbed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.data.assignment import Position
from syncline.errors import ConfigError, DataError
from syncline.workers.own_loop.feed import drawn_feed


def draw(step: int) -> dict[str, object]:
    return {"x": torch.rand(5, 2), "y": (torch.arange(5) + 10 * step, "a note")}


def parts(workers: int, rank: int, *, steps: int = 3, dim: int = 0, function=draw) -> list[object]:
    feed = drawn_feed(function, seed=7, steps=steps, dim=dim)
    shares = feed.order.shares(Position(), rank=rank, size=workers, epochs=1)
    return [feed.source.fetch(share.indices) for share in shares]


def test_the_parts_of_all_workers_are_the_batch_that_one_worker_draws():
    (whole,) = [parts(1, 0)]
    of_two = [parts(2, rank) for rank in (0, 1)]
    for step in range(3):
        joined = torch.cat([of_two[rank][step]["x"] for rank in (0, 1)])
        assert torch.equal(joined, whole[step]["x"])
        numbers = torch.cat([of_two[rank][step]["y"][0] for rank in (0, 1)])
        assert torch.equal(numbers, whole[step]["y"][0])
        assert of_two[0][step]["y"][1] == "a note"
    assert not torch.equal(whole[0]["x"], whole[1]["x"]), "each step draws anew"


def test_drawing_leaves_the_scripts_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    parts(1, 0)
    assert torch.equal(torch.rand(1), expected)


def test_samples_may_lie_along_another_dimension():
    columns = torch.arange(12).reshape(3, 4)
    assert torch.equal(torch.cat([parts(2, r, dim=1, function=lambda: columns)[0] for r in (0, 1)], 1), columns)


def test_samples_of_different_draws_are_joined():
    feed = drawn_feed(draw, seed=7, steps=3, dim=0)
    joined = feed.source.fetch(np.array([4, 5, 6]))
    assert joined["y"][0].tolist() == [4, 10, 11]


@pytest.mark.parametrize(
    ("function", "error", "code"),
    [
        (lambda a, b: a, ConfigError, "batch-function"),
        (lambda: (torch.rand(5), torch.rand(4)), DataError, "batch-shape"),
        (lambda: "no tensor", DataError, "batch-shape"),
        (lambda: torch.rand(0, 2), DataError, "no-samples"),
    ],
)
def test_what_cannot_be_divided_is_refused(function, error, code):
    with pytest.raises(error) as caught:
        drawn_feed(function, seed=0, steps=2, dim=0)
    assert caught.value.code == code


def test_a_batch_of_another_size_is_refused_with_its_step():
    feed = drawn_feed(lambda step: torch.rand(5 if step < 2 else 4), seed=0, steps=3, dim=0)
    with pytest.raises(DataError) as caught:
        feed.source.fetch(np.array([10]))
    assert caught.value.facts == {"step": 2, "size": 4, "before": 5}
