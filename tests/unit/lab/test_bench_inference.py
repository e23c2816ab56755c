"""Every way to answer really answers, and all of them the same."""

from __future__ import annotations

import pytest

from syncline.lab.bench.harness import BenchSettings, measure
from syncline.lab.bench.inference import methods, suites
from syncline.lab.bench.overhead import as_in_a_worker


@pytest.mark.parametrize("batch", [1, 3])
def test_every_way_answers_a_batch_or_several(batch: int) -> None:
    with as_in_a_worker():
        answered = {name: answer() for name, answer in methods("lenet", batch).items()}
    assert answered.pop("syncline evaluate") == 8 * batch
    assert set(answered.values()) == {batch}


@pytest.mark.slow
def test_a_quick_look_measures_one_model_with_a_small_and_a_large_batch() -> None:
    made = suites(BenchSettings(quick=True))
    names = []
    for suite in made:
        names.append(suite.name)
        result = measure(suite, repeats=1)
        assert suite.baseline == "eager"
        assert all(not outcome.failures and all(outcome.values) for outcome in result.outcomes.values())
    assert names == ["inference-lenet-1", "inference-lenet-64"]
