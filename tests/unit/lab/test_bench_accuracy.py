"""Time to an accuracy: both sides train the same, and each run is used for all targets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_processes import start_fork_server, stop_fork_server

from syncline.data.named import named
from syncline.errors import DataError, SynclineError
from syncline.lab.bench import accuracy
from syncline.lab.bench.accuracy import METHODS, AccuracyWorkload, Attempts, Reached, pair
from syncline.lab.bench.harness import BenchSettings

WORKLOAD = AccuracyWorkload(folder="", targets=(0.5, 0.9))


@pytest.fixture(scope="module")
def _fork_server() -> Iterator[None]:
    start_fork_server()
    yield
    stop_fork_server()


@pytest.mark.slow
@pytest.mark.usefixtures("_fork_server")
def test_both_sides_reach_the_same_accuracy_after_the_same_steps() -> None:
    folder = str(named("digits").locate(None, None))
    workload = AccuracyWorkload(folder=folder, data="digits", targets=(0.2, 1.1), epochs=4, every=8)
    found = {}
    for name, method in METHODS.items():
        with pair(workload, method) as run:
            warm_up, found[name] = run(0, 3), run(1, None)
        assert warm_up.steps == 3
        assert warm_up.seconds[1.0] > 0
    theirs, ours = found["plain DDP"], found["syncline"]
    assert theirs.steps == ours.steps > 40
    assert theirs.best == pytest.approx(ours.best, abs=0.01)
    assert theirs.best > 0.5, "it learns"
    for reached in (theirs, ours):
        assert 0 < reached.seconds[0.2] < reached.seconds[1.0]
        assert 1.1 not in reached.seconds


def test_each_seed_runs_once_for_all_targets() -> None:
    asked: list[tuple[int, int | None]] = []

    def run(seed: int, most_steps: int | None) -> Reached:
        asked.append((seed, most_steps))
        return Reached({0.5: 10.0 + seed, 0.9: 20.0 + seed, 1.0: 30.0}, 0.95, 100)

    attempts = Attempts(run)
    first = attempts.time_to(0.5)
    assert [first(), first(), first()] == [30.0, 11.0, 12.0]
    second = attempts.time_to(0.9)
    assert [second(), second(), second()] == [30.0, 21.0, 22.0]
    assert [seed for seed, _ in asked] == [0, 1, 2]
    assert asked[0][1] is not None, "the warm-up is short"
    assert asked[1][1] is None


def test_a_run_that_misses_the_target_has_no_time() -> None:
    attempts = Attempts(lambda seed, most_steps: Reached({0.5: 1.0, 1.0: 3.0}, 0.875, 100))
    measure = attempts.time_to(0.9)
    measure()
    with pytest.raises(SynclineError, match=r"87\.50%.*100 steps.*90\.0%"):
        measure()


def test_a_run_that_failed_fails_for_every_target() -> None:
    def run(seed: int, most_steps: int | None) -> Reached:
        raise SynclineError("alas")

    attempts = Attempts(run)
    for target in WORKLOAD.targets:
        with pytest.raises(SynclineError, match="alas"):
            attempts.time_to(target)()


def test_without_the_data_nothing_is_measured_and_the_user_is_informed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere:
        def locate(self, data_dir, progress):
            raise DataError("There is no MNIST here.")

    monkeypatch.setattr(accuracy, "named", lambda name: Nowhere())
    said: list[str] = []
    assert list(accuracy.suites(BenchSettings(say=said.append))) == []
    assert said[0].endswith("There is no MNIST here.")
