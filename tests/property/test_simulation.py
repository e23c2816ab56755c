"""Simulated runs: what must hold for any of them, and cases whose answer is known."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.planning.cost.network import Network, read_link
from syncline.planning.cost.waiting import expected_largest
from syncline.planning.simulation.outages import best_interval_s, run_outages
from syncline.planning.simulation.pace import Rules, run_pace
from syncline.planning.simulation.scenario import (
    Failures,
    Scenario,
    mean_time_between_failures,
    seconds_of,
    straggling_of,
)
from syncline.planning.simulation.simulate import simulate
from syncline.strategies.method import ModelShapes
from syncline.strategies.presets import PRESETS

few = settings(max_examples=25)
waits = st.sampled_from(["all", "peers", "bound", "nobody"])
scenarios = st.builds(
    Scenario, workers=st.integers(2, 40), steps=st.integers(1, 60), compute_s=st.floats(1e-3, 1.0),
    straggling=st.floats(0, 1), seed=st.integers(0, 9),
)  # fmt: skip


@few
@given(scenarios, waits, st.integers(0, 5))
def test_no_run_is_faster_than_its_computing_and_its_steps_add_up(scenario, wait, bound):
    pace = run_pace(scenario, Rules(waits=wait, bound=bound, exchange_s=1e-4))
    assert pace.step_s.sum() == pytest.approx(pace.seconds)
    assert 0 <= pace.waited < 1
    if not scenario.straggling:
        assert pace.seconds == pytest.approx(scenario.steps * (scenario.compute_s + 1e-4))


@few
@given(scenarios, st.integers(0, 5))
def test_a_bound_is_never_exceeded_and_lies_between_lock_step_and_no_bound(scenario, bound):
    stale = run_pace(scenario, Rules(waits="bound", bound=bound))
    assert max(stale.staleness) <= bound
    slow, free = run_pace(scenario, Rules(waits="all")), run_pace(scenario, Rules(waits="nobody"))
    assert free.seconds <= stale.seconds * (1 + 1e-9)
    assert stale.seconds <= slow.seconds * (1 + 1e-9)


def test_a_bound_of_0_is_lock_step():
    scenario = Scenario(workers=20, steps=50, compute_s=0.1, straggling=0.4)
    lock_step = run_pace(scenario, Rules(waits="all")).seconds
    assert run_pace(scenario, Rules(waits="bound")).seconds == pytest.approx(lock_step)


def test_lock_step_takes_the_largest_of_n_times_as_in_theory():
    scenario = Scenario(workers=1000, steps=200, compute_s=1.0, straggling=0.3)
    simulated = run_pace(scenario, Rules(waits="all")).seconds / 200
    assert simulated == pytest.approx(math.exp(0.3 * expected_largest(1000)), rel=0.05)


def test_saturated_servers_serve_one_request_after_another():
    scenario = Scenario(workers=50, steps=40, compute_s=0.01, straggling=0.2)
    pace = run_pace(scenario, Rules(waits="nobody", service_s=0.005))
    assert pace.seconds == pytest.approx(40 * 50 * 0.005, rel=0.08)


@few
@given(scenarios, st.floats(0.5, 50), st.booleans())
def test_failures_only_cost_time_and_all_of_it_is_accounted_for(scenario, mean_s, in_place):
    failures = Failures(mean_s=mean_s * scenario.workers, in_place=in_place, repair_s=0.1, checkpoint_s=0.01)
    scenario = Scenario(**{**vars(scenario), "failures": failures})
    rules = Rules(waits="all")
    pace = run_pace(scenario, rules)
    outages = run_outages(scenario, rules, pace)
    costs = outages.repeated_s + outages.repairs_s + outages.checkpoints_s
    if math.isfinite(outages.seconds):
        assert outages.seconds == pytest.approx(pace.seconds + costs)
    assert outages.seconds >= pace.seconds


def test_the_best_interval_is_better_than_others():
    failures = Failures(mean_s=100 * 2000.0, in_place=False, repair_s=20, checkpoint_s=5)

    def seconds(interval: float) -> float:
        total = 0.0
        for seed in range(6):
            made = Scenario(workers=100, steps=2000, compute_s=25.0, seed=seed,
                            failures=Failures(**{**vars(failures), "interval_s": interval}))  # fmt: skip
            rules = Rules(waits="all")
            total += run_outages(made, rules, run_pace(made, rules)).seconds
        return total

    best = best_interval_s(5, 2000)
    assert best == pytest.approx(math.sqrt(2 * 5 * 2000))
    assert seconds(best) < min(seconds(best / 4), seconds(best * 4))


@pytest.mark.parametrize("name", ["allreduce", "ssp", "server-async", "gossip"])
def test_10000_workers_take_1000_steps_in_seconds(name):
    steps = 1000
    scenario = Scenario(workers=10_000, steps=steps, compute_s=0.1, straggling=0.3, share=64,
                        failures=Failures(mean_s=30 * 86400))  # fmt: skip
    network = Network(link=read_link("10gbit,50us"), hosts=5000, cores=2)
    method = PRESETS[name.replace("-", "_")].make().method
    shapes = ModelShapes(11_000_000)
    method.traffic(shapes, 2)  # loads what it needs
    tracemalloc.start()
    began = time.process_time()
    found = simulate(scenario, name, method, shapes, network)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10
    assert peak < 1e9
    assert found.workers == 10_000
    assert 0 < found.goodput <= found.throughput


def test_staleness_without_a_bound_is_about_the_number_of_the_others():
    pace = run_pace(Scenario(workers=50, steps=200, compute_s=0.1, straggling=0.3), Rules(waits="nobody"))
    mean = np.average(list(pace.staleness), weights=list(pace.staleness.values()))
    assert mean == pytest.approx(49, rel=0.15)


def test_at_saturated_servers_all_others_come_between():
    pace = run_pace(Scenario(workers=30, steps=100, compute_s=0.01), Rules(waits="nobody", service_s=0.01))
    assert set(pace.staleness) <= {28, 29, 30}


def test_texts_are_read():
    assert seconds_of("40ms") == 0.04
    assert seconds_of("2 hours") == 7200
    assert mean_time_between_failures("1 per worker per 30 days") == 30 * 86400
    assert mean_time_between_failures("2 per worker per day") == 43200
    assert mean_time_between_failures("none") == math.inf
    assert straggling_of("lognormal(0.3)") == 0.3
    for read in (seconds_of, mean_time_between_failures, straggling_of):
        with pytest.raises(ValueError, match="Write"):
            read("often")
