"""Every number of a model is summed in one round, owned by one worker, and updated in one chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.layouts.shards import Leaf, chunks_of, pieces_by_rank, pieces_of, rounds_of, whole_leaves

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@given(SIZES, st.integers(1, 50))
def test_rounds_go_from_the_end_to_the_beginning_and_name_their_parameters(sizes, limit):
    rounds = rounds_of(sizes, limit)
    total = sum(sizes)
    assert [n for r in rounds for n in range(r.whole.high - 1, r.whole.low - 1, -1)] == list(range(total - 1, -1, -1))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    for r in rounds:
        assert 0 < r.whole.high - r.whole.low <= limit
        inside = [
            n
            for n, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if size and start < r.whole.high and start + size > r.whole.low
        ]
        assert set(inside) <= set(r.parameters)
        assert inside[0] == r.parameters[0]
        assert inside[-1] == r.parameters[-1]


@given(SIZES, st.integers(1, 50), st.integers(1, 5))
def test_each_number_is_owned_by_one_worker_and_shares_are_equal(sizes, limit, size):
    rounds = rounds_of(sizes, limit)
    owned = [pieces_of(whole_leaves(sizes), rounds, rank, size) for rank in range(size)]
    numbers = [n for own in owned for piece in own for n in range(piece.low, piece.high)]
    assert sorted(numbers) == list(range(sum(sizes)))
    counts = [sum(p.high - p.low for p in own) for own in owned]
    assert max(counts) - min(counts) <= len(rounds)
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    for own in owned:
        assert all(starts[p.parameter] <= p.low < p.high <= starts[p.parameter + 1] for p in own)


@given(SIZES, st.integers(1, 50), st.integers(1, 20))
def test_chunks_hold_the_same_numbers_and_are_full_but_for_the_last(sizes, limit, most):
    pieces = pieces_of(whole_leaves(sizes), rounds_of(sizes, limit), 0, 2)
    chunks = chunks_of(pieces, most)
    assert [n for p in pieces for n in range(p.low, p.high)] == [
        n for c in chunks for p in c for n in range(p.low, p.high)
    ]
    assert [n for p in pieces for n in gradients_of(p)] == [n for c in chunks for p in c for n in gradients_of(p)]
    lengths = [sum(p.high - p.low for p in chunk) for chunk in chunks]
    assert all(length == most for length in lengths[:-1])
    assert all(0 < length <= most for length in lengths)


def gradients_of(piece):
    return range(piece.gradient, piece.gradient + piece.high - piece.low)


@given(SIZES, st.integers(1, 50), st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_each_number_and_its_gradient_belong_to_one_worker_of_a_replica(sizes, limit, shards, lanes, random):
    leaves_by_lane = [[] for _ in range(lanes)]
    for n, low, high in whole_leaves(sizes):
        middle = random.randint(low, high)  # parameters may be divided between lanes
        for part in ((low, middle), (middle, high)):
            if part[0] < part[1]:
                random.choice(leaves_by_lane).append(Leaf(n, *part))
    owned = pieces_by_rank(leaves_by_lane, shards, limit)
    assert len(owned) == shards * lanes
    total = sum(sizes)
    assert sorted(n for own in owned for p in own for n in range(p.low, p.high)) == list(range(total))
    assert sorted(n for own in owned for p in own for n in gradients_of(p)) == list(range(total))
    firsts = [sum(leaf.high - leaf.low for lane in leaves_by_lane[:n] for leaf in lane) for n in range(lanes + 1)]
    for rank, own in enumerate(owned):
        lane = rank % lanes
        assert all(firsts[lane] <= n < firsts[lane + 1] for p in own for n in gradients_of(p))
