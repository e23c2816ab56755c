"""The bench compares what is equal, and its goals can be judged."""

from __future__ import annotations

import numpy as np
from graph_examples import two_groups

from syncline.graphs.graph import Graph
from syncline.graphs.node_data import node_data
from syncline.lab.bench import graph_networks
from syncline.lab.bench.graphs import suites_of
from syncline.lab.bench.harness import measure


def test_both_suites_measure_ranks_that_have_been_found_equal() -> None:
    rng = np.random.default_rng(0)
    results = [measure(made, repeats=1) for made in suites_of(Graph(rng.integers(0, 200, (2, 600)), size=200))]
    assert [result.suite.name for result in results] == ["pagerank", "pagerank-edges"]
    assert all(not outcome.failures for result in results for outcome in result.outcomes.values())
    (verdict,) = results[1].verdicts()
    assert verdict.ratio is not None
    assert verdict.ratio.median < 0.8


def test_steps_of_a_network_are_measured_beside_equal_ones_by_hand() -> None:
    steps, halos = [measure(made, repeats=1) for made in graph_networks.suites_of(node_data(two_groups()))]
    assert all(not outcome.failures for result in (steps, halos) for outcome in result.outcomes.values())
    assert set(halos.outcomes) >= {"greedy", "hash", "vertex-cut"}
