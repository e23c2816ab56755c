"""The bench of fits compares what finds the same, and its goals can be judged."""

from __future__ import annotations

from syncline.lab.bench.blocks import suites
from syncline.lab.bench.harness import BenchSettings, measure


def test_lasso_is_measured_beside_scikit_learn_after_the_coefficients_were_found_equal():
    made = suites(BenchSettings(quick=True))
    result = measure(next(made), repeats=1)
    made.close()
    assert result.suite.name == "lasso"
    assert not any(outcome.failures for outcome in result.outcomes.values())
    (verdict,) = result.verdicts()
    assert verdict.ratio is not None
