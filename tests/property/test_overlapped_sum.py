"""Summing part by part while it is computed: the same bits as at once, in whatever order parts become complete."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.overlapped_sum import OverlappedSum
from syncline.strategies.overlap import cut


@st.composite
def plays(draw: st.DrawFn) -> dict[str, Any]:
    """Some ranks, some parts, weights, and rounds in each of which some parts are complete early, in any order."""
    size, parts = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(0, 9), min_size=parts, max_size=parts))
    events = [(rank, part) for rank in range(size) for part in range(parts)]
    rounds = draw(
        st.lists(st.lists(st.sampled_from(events), unique=True, max_size=len(events)), min_size=1, max_size=3)
    )
    weight = st.floats(0.125, 1.0, width=32) | st.sampled_from([0.25, 0.5, 1.0])
    weights = draw(st.lists(weight, min_size=size, max_size=size))
    return {"size": size, "sizes": sizes, "rounds": rounds, "weights": weights}


class Ranks:
    """Ranks of one process, which say in turn what they have completed, and finish on threads."""

    def __init__(self, size: int, sizes: list[int]) -> None:
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
        parts = list(zip([0, *ends[:-1]], ends, strict=True))
        self.memory = mmap.mmap(-1, OverlappedSum.bytes_needed(size, len(parts)))
        self.copies = [torch.zeros(ends[-1]) for _ in range(size)]
        meeting = threading.Barrier(size)
        self.sums = [
            OverlappedSum(self.memory, self.copies, parts, rank=r, barrier=lambda: meeting.wait(10))
            for r in range(size)
        ]

    def finish(self) -> None:
        threads = [threading.Thread(target=s.finish) for s in self.sums]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


def at_once(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The sum in rank order."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total.add(value, alpha=weight)
    return total


@given(plays(), st.randoms(use_true_random=False))
def test_the_bits_are_those_of_a_sum_at_once(play, random):
    ranks = Ranks(play["size"], play["sizes"])
    numel = sum(play["sizes"])
    for events in play["rounds"]:
        values = [torch.tensor([random.uniform(-1, 1) for _ in range(numel)]) for _ in range(play["size"])]
        expected = at_once(values, play["weights"])
        for copy, value, summing, weight in zip(ranks.copies, values, ranks.sums, play["weights"], strict=True):
            copy.copy_(value)
            summing.begin(weight)
        for rank, part in events:
            ranks.sums[rank].complete(part)
        ranks.finish()
        assert all(torch.equal(copy, expected) for copy in ranks.copies)


def test_a_part_is_added_up_as_soon_as_the_last_rank_has_completed_it():
    ranks = Ranks(2, [4, 4])
    for summing, copy in zip(ranks.sums, ranks.copies, strict=True):
        summing.begin(0.5)
        copy.fill_(2.0)
    first, second = ranks.sums
    first.complete(0)
    assert (first.added_ahead, second.added_ahead) == (0, 0)
    second.complete(0)
    assert (first.added_ahead, second.added_ahead) == (0, 1), "each rank adds up its own piece"
    first.complete(1)
    assert (first.added_ahead, second.added_ahead) == (1, 1), "what the others completed meanwhile is noticed"
    ranks.copies[0][4:] = 7.0  # a part that is not complete everywhere is still its owner's
    ranks.finish()
    assert ranks.copies[1].tolist() == [2.0] * 4 + [4.5] * 4


def test_what_was_complete_in_the_last_round_is_not_in_this_one():
    ranks = Ranks(2, [4])
    for _ in range(2):
        for summing, copy in zip(ranks.sums, ranks.copies, strict=True):
            summing.begin(1.0)
            copy.fill_(1.0)
        ranks.sums[0].complete(0)
        assert ranks.sums[0].added_ahead == 0
        ranks.finish()
        assert ranks.copies[0].tolist() == [2.0] * 4


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 100))
def test_parameters_are_cut_into_neighbors_that_are_worth_it(sizes, least):
    groups = cut(sizes, least)
    assert [k for first, last in groups for k in range(first, last + 1)] == list(range(len(sizes)))
    assert all(sum(sizes[first : last + 1]) >= least for first, last in groups[1:]), "only the first may be small"
