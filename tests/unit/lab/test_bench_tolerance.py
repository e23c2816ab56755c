"""The comparison with and without fault tolerance: one run, and only the steps that are on are accounted for."""

from __future__ import annotations

from syncline.data.ledger import Opened, Used, ranges_of
from syncline.data.ledger_file import read_ledger
from syncline.lab.bench.overhead import as_in_a_worker, make_workload
from syncline.lab.bench.tolerance import CASES, Costs, run


def test_every_third_step_is_on_and_has_its_samples_in_the_ledger(tmp_path):
    with as_in_a_worker():
        costs = run(make_workload(batch=256, steps=60), tmp_path)  # long enough for some signs of life
    assert set(costs.step_s) == set(CASES)
    assert all(seconds > 0 for seconds in costs.step_s.values())
    assert costs.threads_s > 0
    opened, *used = read_ledger(tmp_path / "ledger.jsonl")
    assert isinstance(opened, Opened)
    ranges = [r for line in used if isinstance(line, Used) for run in line.runs for r in ranges_of(run)]
    assert ranges == [(0, 256 * step, 256 * step + 256) for step in range(1, 60, 3)]


def test_the_threads_count_where_it_is_on():
    costs = Costs({"off": 0.010, "on": 0.0101, "off, again": 0.010}, threads_s=0.0002)
    assert [round(costs.of(case), 6) for case in CASES] == [0.01, 0.0103, 0.01]
