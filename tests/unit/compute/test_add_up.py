"""Adding up copies by compiled code: the bits of torch's sum, in all of them, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.comms import overlapped_sum
from syncline.compute.kernels.add_up import add_copies
from syncline.compute.kernels.build import why_unavailable

has_kernels = pytest.mark.skipif(bool(why_unavailable("sums")), reason=f"no kernels here: {why_unavailable('sums')}")

GUARD = 16


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@has_kernels
@given(
    count=st.integers(0, 100) | st.integers(1000, 3000),
    seed=st.integers(0, 9),
    weights=st.lists(st.sampled_from((0.125, 0.25, 0.5, 1.0, 2.0)), min_size=1, max_size=8),
)
def test_all_become_what_torch_would_make_of_them(count, seed, weights):
    generator = torch.Generator().manual_seed(seed)
    room = [torch.randn(GUARD + count + GUARD, generator=generator) for _ in weights]
    before = [each.clone() for each in room]
    copies = [each[GUARD : GUARD + count] for each in room]
    expected = copies[0] * weights[0]
    for copy, weight in zip(copies[1:], weights[1:], strict=True):
        expected = expected.add(copy, alpha=weight)
    assert add_copies(copies, weights)
    for copy, now, then in zip(copies, room, before, strict=True):
        assert torch.equal(copy, expected)
        assert torch.equal(now[:GUARD], then[:GUARD])
        assert torch.equal(now[GUARD + count :], then[GUARD + count :])


@pytest.mark.parametrize("other", [torch.ones(4).double(), torch.ones(4, 4)[:, 0], torch.ones(4).bfloat16()])
def test_what_is_not_for_it_is_left_alone(other):
    copies = [torch.zeros(4), other]
    assert not add_copies(copies, [1.0, 1.0])
    assert not copies[0].any()


def test_many_copies_are_left_to_torch():
    copies = [torch.ones(4) for _ in range(9)]
    assert not add_copies(copies, 9 * [1.0])
    assert all((copy == 1).all() for copy in copies)


def test_with_several_threads_it_is_left_to_torch():
    torch.set_num_threads(2)
    assert not add_copies([torch.ones(4), torch.ones(4)], [1.0, 1.0])


@pytest.mark.parametrize("weights", [(0.5, 0.5), (1.0, 1.0), (0.3, 0.7), (0.25, 0.5, 0.25), (0.25, 0.25, 0.25, 0.25)])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exchange_has_the_same_bits_with_it_and_without(monkeypatch, rank, weights):
    generator = torch.Generator().manual_seed(0)
    copies = [torch.randn(1000, generator=generator) for _ in weights]
    others = [copy.clone() for copy in copies]
    overlapped_sum.add_up(copies, weights, rank)
    monkeypatch.setattr(overlapped_sum, "add_copies", lambda *_: False)
    overlapped_sum.add_up(others, weights, rank)
    for ours, torchs in zip(copies, others, strict=True):
        assert torch.equal(ours, torchs)
        assert torch.equal(ours, copies[0])
