"""The ways of adding up are really called, by processes that exist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_processes import start_fork_server, stop_fork_server

from syncline.lab.bench.allreduce import ring, suites
from syncline.lab.bench.harness import BenchSettings, measure


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    start_fork_server()
    yield
    stop_fork_server()


def test_every_way_can_be_measured_also_more_often_than_a_number_can_double():
    with ring(2) as found:
        for way in ("gloo", "shared memory", "copying"):
            assert 0 < found(way, 1000, 60) < 60, way


def test_a_suite_runs_every_way_and_judges_shared_memory_by_gloo():
    made = suites(BenchSettings(quick=True))
    suite = next(made)
    assert (suite.name, suite.baseline) == ("allreduce-1.72MB-2", "gloo")
    result = measure(suite, repeats=1)
    assert all(not outcome.failures and all(outcome.values) for outcome in result.outcomes.values())
    (verdict,) = result.verdicts()
    assert verdict.goal.limit == 1 / 20
    made.close()
