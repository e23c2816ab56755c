"""Runs of growing size, measured by speed and, without training again, by memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline.lab.bench import growth
from syncline.lab.bench.harness import BenchSettings, measure
from syncline.lab.bench.worker_groups import TimedBlock, TrainingMethod, TrainingWorkload, WorkerGroup

trained: list[int] = []


@pytest.fixture(autouse=True)
def _crews_that_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def worker_group(workload: TrainingWorkload, method: TrainingMethod, size: int) -> Iterator[WorkerGroup]:
        def block(warm_up: int, steps: int) -> TimedBlock:
            trained.append(size)
            return TimedBlock(2.0, size * workload.batch * steps, 0.0, peak_bytes=workload.samples * 1_000_000)

        yield block

    trained.clear()
    monkeypatch.setattr(growth, "worker_group", worker_group)


def test_one_thing_grows_at_a_time_and_the_smallest_is_the_baseline() -> None:
    for quick in (True, False):
        for what, sizes in growth.sizes(quick=quick).items():
            grown = [(size.workers, size.parameters, size.samples) for size in sizes.values()]
            columns = [len(set(column)) for column in zip(*grown, strict=True)]
            assert sorted(columns) == [1, 1, len(sizes)], what
            assert grown == sorted(grown)


def test_memory_is_that_of_the_training_whose_speed_was_measured() -> None:
    found = {suite.name: measure(suite, repeats=1) for suite in growth.suites(BenchSettings(quick=True))}
    assert list(found) == [
        "growth-workers", "growth-workers-memory", "growth-parameters", "growth-parameters-memory",
        "growth-samples", "growth-samples-memory",
    ]  # fmt: skip
    assert found["growth-workers"].outcomes["2 workers"].values == [2 * 64 * 10 / 2.0]
    assert found["growth-workers"].suite.baseline == "1 worker"
    assert found["growth-samples-memory"].outcomes["65,536 samples"].values == [65_536.0]
    assert len(trained) == 3 * 2 * 2, "a warm-up and a round for each size, and none for its memory"
