"""Who is compared with whom by training speed, and which goals are set. The training is in `test_bench_crews`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline.lab.bench import scaling, training
from syncline.lab.bench.harness import BenchSettings, Suite, measure
from syncline.lab.bench.worker_groups import TimedBlock, TrainingMethod, TrainingWorkload, WorkerGroup
from syncline.models import zoo

started: list[tuple[str, str, int]] = []


@pytest.fixture(autouse=True)
def _crews_that_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def worker_group(workload: TrainingWorkload, method: TrainingMethod, size: int) -> Iterator[WorkerGroup]:
        started.append((workload.model, method.kind, size))
        yield lambda warm_up, steps: TimedBlock(1.0, size * workload.batch * steps, 0.0, 0)

    started.clear()
    monkeypatch.setattr(training, "worker_group", worker_group)


def made(module, *, quick: bool) -> tuple[list[Suite], list[str]]:
    said: list[str] = []
    return list(module.suites(BenchSettings(quick=quick, say=said.append))), said


def goals_of(suite: Suite) -> list[tuple[str, float, str, str]]:
    return [(g.contender, g.limit, g.bound, g.against or suite.baseline) for g in suite.goals]


@pytest.mark.parametrize("has_bf16", [True, False])
def test_each_model_is_compared_with_the_same_settings_and_with_defaults(monkeypatch, has_bf16: bool) -> None:
    monkeypatch.setattr(training, "bf16_is_fast", lambda: has_bf16)
    suites, said = made(training, quick=False)
    goals = {suite.name: goals_of(suite) for suite in suites}
    limit = ("syncline", 0.97, "at least", "no communication")
    assert goals == {
        "training-lenet-same-settings": [("syncline", 1.25, "at least", "tuned DDP"), limit],
        "training-lenet-defaults": [
            ("syncline", 2.0, "at least", "plain DDP"),
            ("syncline --precision auto", 2.8, "at least", "plain DDP"),
        ],
        "training-resnet18-same-settings": [limit],
        "training-resnet18-defaults": [
            ("syncline", 1.05, "at least", "plain DDP"),
            ("syncline --precision auto", 1.8, "at least", "plain DDP"),
        ],
    }
    assert any("bf16" in text for text in said) is not has_bf16
    quick, _ = made(training, quick=True)
    by_auto = [suite.name for suite in quick if any("auto" in contender.name for contender in suite.contenders)]
    assert by_auto == (["training-lenet-defaults", "training-resnet18-defaults"] if has_bf16 else [])


def test_throughput_is_in_images_per_second() -> None:
    suite = next(training.suites(BenchSettings(quick=True)))
    result = measure(suite, repeats=1)
    assert suite.unit == "images/s"
    assert result.outcomes["syncline"].values == [2 * 64 * 10.0]


def test_scaling_compares_several_workers_with_one_process_and_one_worker_with_the_same_loop_by_hand() -> None:
    suites, said = made(scaling, quick=True)
    assert [suite.name for suite in suites] == [
        "scaling-lenet-1",
        "scaling-lenet-2",
        "scaling-lstm-1",
        "scaling-lstm-2",
    ]
    assert not said
    one, two = suites[:2]
    assert goals_of(one) == [("syncline", 0.98, "at least", "by hand, tuned")]
    assert [c.name for c in two.contenders] == ["one process", "no communication", "tuned DDP", "syncline"]
    assert [size for model, _, size in started if model == "lenet"] == [1, 1, 1, 2, 2, 2]


def test_the_full_scaling_suite_has_every_model_with_up_to_four_workers_and_untuned_contenders() -> None:
    suites, _ = made(scaling, quick=False)
    models = ("lenet", "lstm", "autoencoder", "alexnet", "resnet18", "resnet50")
    assert [suite.name for suite in suites] == [f"scaling-{model}-{n}" for model in models for n in (1, 2, 4)]
    assert [c.name for c in suites[0].contenders] == ["by hand, tuned", "by hand", "syncline"]
    assert "plain DDP" in [c.name for c in suites[1].contenders]


def test_an_unavailable_model_is_skipped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling.zoo, "names", lambda: ["lenet"])
    suites, said = made(scaling, quick=True)
    assert len(suites) == 2
    (message,) = said
    assert "'lstm'" in message


def test_the_models_of_scaling_can_be_built_for_their_samples() -> None:
    for quick in (True, False):
        for case in scaling.cases(quick=quick):
            assert case.workload.model in zoo.names()
            assert case.workload.samples >= 4 * case.workload.batch, "there is a batch for four workers"
