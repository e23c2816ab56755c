"""The bench compares what is equal, and its goals can be judged."""

from __future__ import annotations

import numpy as np

from syncline.graphs.graph import Graph
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
