"""Gossip: who takes from whom, with what weight, and what comes of it."""

from __future__ import annotations

import pytest
import torch
from generators import member_lists, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.comms.mixing import (
    TOPOLOGIES,
    bipartite,
    choose_passive,
    exponential,
    matching,
    mix,
    mixing_matrix,
    pair,
    receivers,
    ring,
    spectral_gap,
    static_exponential,
    torus,
)

SYMMETRIC = {"ring", "torus", "random"}
every_topology = pytest.mark.parametrize("name", sorted(TOPOLOGIES))
steps = st.integers(0, 1000)
few = settings(max_examples=12)


def disagreement(x):
    return (x - x.mean(0)).norm().item()


@every_topology
@few
@given(members=member_lists, step=steps, seed=seeds)
def test_every_mixing_is_doubly_stochastic_over_exactly_the_members(name, members, step, seed):
    mixing = TOPOLOGIES[name](members, step, seed)
    assert sorted(mixing) == sorted(members)
    assert all(rank in weights and set(weights) <= set(members) for rank, weights in mixing.items())
    matrix = mixing_matrix(mixing)
    ones = torch.ones(len(members), dtype=torch.float64)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(0), ones)
    torch.testing.assert_close(matrix.sum(1), ones)
    if name in SYMMETRIC:
        assert torch.equal(matrix, matrix.T)


@every_topology
@few
@given(members=member_lists, step=steps, seed=seeds)
def test_everyone_computes_the_same_mixing_whatever_the_order_of_its_list(name, members, step, seed):
    assert TOPOLOGIES[name](members, step, seed) == TOPOLOGIES[name](members[::-1], step, seed)


@every_topology
@few
@given(members=member_lists, step=steps, seed=seeds)
def test_ranks_with_gaps_mix_as_ranks_without(name, members, step, seed):
    with_gaps = mixing_matrix(TOPOLOGIES[name](members, step, seed))
    assert torch.equal(with_gaps, mixing_matrix(TOPOLOGIES[name](range(len(members)), step, seed)))


@every_topology
@few
@given(members=member_lists, seed=seeds)
def test_gossip_keeps_the_mean_and_ends_in_agreement_on_it(name, members, seed):
    x = {rank: torch.tensor([float(rank), rank**2 / 100], dtype=torch.float64) for rank in members}
    mean = torch.stack(list(x.values())).mean(0)
    start = disagreement(torch.stack(list(x.values())))
    for step in range(40):
        mixing = TOPOLOGIES[name](members, step, seed)
        x = {rank: mix(x, mixing[rank]) for rank in members}
    torch.testing.assert_close(torch.stack(list(x.values())).mean(0), mean)
    assert disagreement(torch.stack(list(x.values()))) <= 0.9 * start + 1e-9


@pytest.mark.parametrize("name", ["ring", "torus", "static-exponential"])
@few
@given(members=member_lists)
def test_gossip_agrees_at_least_at_the_rate_of_its_spectral_gap(name, members):
    matrix = mixing_matrix(TOPOLOGIES[name](members))
    rate = 1 - spectral_gap(matrix)
    x = torch.randn(len(members), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = disagreement(x)
    for step in range(1, 20):
        x = matrix @ x
        assert disagreement(x) <= rate**step * start * (1 + 1e-9) + 1e-12


@few
@given(st.integers(2, 24))
def test_the_slowest_mode_of_a_symmetric_topology_decays_at_exactly_the_spectral_gap(size):
    for topology in (ring, torus):
        matrix = mixing_matrix(topology(range(size)))
        values, vectors = torch.linalg.eigh(matrix - 1.0 / size)
        slowest = vectors[:, values.abs().argmax()]
        rate = 1 - spectral_gap(matrix)
        assert disagreement(matrix @ slowest) == pytest.approx(rate * disagreement(slowest), abs=1e-12)


def test_spectral_gaps_are_those_of_the_literature():
    assert spectral_gap(mixing_matrix(ring(range(12)))) == pytest.approx(
        1 - (1 + 2 * torch.cos(torch.tensor(2 * torch.pi / 12, dtype=torch.float64)).item()) / 3
    )
    for n in (8, 16, 64):  # Ying et al. 2021, theorem 1: 2 / (1 + ceil(log2 n)) for even n
        degree = (n - 1).bit_length()
        assert spectral_gap(mixing_matrix(static_exponential(range(n)))) == pytest.approx(2 / (1 + degree))
    gaps = [spectral_gap(mixing_matrix(topology(range(64)))) for topology in (ring, torus, static_exponential)]
    assert gaps == sorted(gaps)


@few
@given(st.integers(0, 5), steps)
def test_one_peer_exponential_gossip_of_a_power_of_two_reaches_the_exact_mean_in_one_cycle(power, step):
    size = 2**power
    product = torch.eye(size, dtype=torch.float64)
    for k in range(power):
        product = mixing_matrix(exponential(range(size), step + k)) @ product
    torch.testing.assert_close(product, torch.full((size, size), 1 / size, dtype=torch.float64))


@few
@given(member_lists)
def test_nobody_has_more_peers_than_its_topology_says(members):
    peers = {name: max(len(w) - 1 for w in topology(members).values()) for name, topology in TOPOLOGIES.items()}
    most = {
        "ring": 2,
        "torus": 4,
        "exponential": 1,
        "random": 1,
        "static-exponential": (len(members) - 1).bit_length(),
    }
    assert all(peers[name] <= most[name] for name in TOPOLOGIES)


@every_topology
@few
@given(members=member_lists, step=steps, seed=seeds)
def test_who_sends_to_whom_agrees_with_who_takes_from_whom(name, members, step, seed):
    mixing = TOPOLOGIES[name](members, step, seed)
    sent = {(rank, to) for rank in members for to in receivers(mixing, rank)}
    taken = {(source, rank) for rank in members for source in mixing[rank] if source != rank}
    assert sent == taken


@few
@given(member_lists, steps, seeds)
def test_a_matching_names_everybody_once(members, step, seed):
    pairs, left_over = matching(members, step, seed)
    named = [rank for two in pairs for rank in two] + ([] if left_over is None else [left_over])
    assert sorted(named) == sorted(members)
    assert (left_over is None) == (len(members) % 2 == 0)


def test_matchings_change_from_step_to_step_and_with_the_seed():
    drawn = {str(matching(range(8), step, seed)) for step in range(5) for seed in range(5)}
    assert len(drawn) > 15


@few
@given(st.integers(2, 24), st.data())
def test_losing_members_leaves_the_others_a_mixing_of_their_own(size, data):
    survivors = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size - 1, unique=True))
    for topology in TOPOLOGIES.values():
        mixing = topology(survivors, 3, 5)
        assert {peer for weights in mixing.values() for peer in weights} == set(survivors)
        if len(survivors) > 1 and topology is not TOPOLOGIES["random"]:
            assert all(len(weights) > 1 for weights in mixing.values())


# ------------------------------------------------------------------------------------------------------ AD-PSGD


@few
@given(member_lists.filter(lambda members: len(members) > 1), st.data())
def test_a_pair_averages_and_all_others_keep_their_own(members, data):
    first, second = data.draw(st.permutations(members))[:2]
    matrix = mixing_matrix(pair(members, first, second))
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, matrix)
    x = {rank: torch.tensor([float(rank)]) for rank in members}
    after = {rank: mix(x, weights).item() for rank, weights in pair(members, first, second).items()}
    assert after[first] == after[second] == (first + second) / 2
    assert all(after[rank] == rank for rank in members if rank not in (first, second))


@few
@given(member_lists, steps, seeds)
def test_active_ranks_ask_only_passive_ones(members, step, seed):
    active, passive = bipartite(members)
    assert sorted(active + passive) == sorted(members)
    for rank in active:
        asked = choose_passive(rank, members, step, seed)
        assert asked in passive if passive else asked is None
    for rank in passive:
        with pytest.raises(ValueError, match=r"Rank \d+ .* active ranks"):
            choose_passive(rank, members, step, seed)


def test_over_time_an_active_rank_asks_every_passive_one():
    assert {choose_passive(0, range(8), step, seed=1) for step in range(60)} == {1, 3, 5, 7}


def test_pair_averaging_of_active_and_passive_ranks_reaches_agreement():
    x = {rank: torch.tensor([float(rank)], dtype=torch.float64) for rank in range(6)}
    for step in range(100):
        for rank in bipartite(range(6))[0]:
            mixing = pair(range(6), rank, choose_passive(rank, range(6), step, seed=0))
            x = {other: mix(x, mixing[other]) for other in x}
    torch.testing.assert_close(torch.cat(list(x.values())), torch.full((6,), 2.5, dtype=torch.float64))


@every_topology
@pytest.mark.parametrize("members", [[], [1, 1]])
def test_nobody_and_the_same_rank_twice_are_refused(name, members):
    with pytest.raises(ValueError, match="listed once"):
        TOPOLOGIES[name](members)


def test_a_pair_is_two_members():
    with pytest.raises(ValueError, match="3 and 9 are not two of the members"):
        pair([1, 2, 3], 3, 9)
