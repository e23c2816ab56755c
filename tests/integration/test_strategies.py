"""Strategies carried out by real workers: the equivalences that theory promises, and that all of them learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_runs import InterruptAt, final_state, relative_difference, same_bits, samples, small_net

import syncline
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.strategies.words import bytes_per_exchange
from syncline.telemetry.events import Progress
from syncline.telemetry.run_dir import RunDir


def train(tmp_path: Path, strategy: str, workers: int = 3, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "model": small_net(), "data": samples(), "test": samples(57, seed=2), "batch": 12, "epochs": 4,
        "optimizer": syncline.sgd(lr=0.1), "out": str(tmp_path), "quiet": True, **changes,
    }  # fmt: skip
    return syncline.train(strategy=strategy, workers=workers, **settings)  # type: ignore[arg-type]


def model_of(result: syncline.Result) -> dict[str, object]:
    return final_state(result.run_dir)["model"]


def test_averaging_after_every_step_of_plain_sgd_is_the_all_reduce(tmp_path):
    reference = train(tmp_path / "a", "allreduce")
    assert relative_difference(model_of(reference), model_of(train(tmp_path / "b", "sparknet(tau=1)"))) < 1e-5
    assert (
        relative_difference(model_of(reference), model_of(train(tmp_path / "c", "updates(outer=sgd(lr=1.0))"))) < 1e-5
    )


def test_an_outer_sgd_of_rate_1_is_averaging(tmp_path):
    changes = {"optimizer": syncline.sgd(lr=0.1, momentum=0.9)}
    plain = train(tmp_path / "a", "sparknet(4)", **changes)
    outer = train(tmp_path / "b", "updates(outer=sgd(lr=1.0)) | every(4)", **changes)
    assert relative_difference(model_of(plain), model_of(outer)) < 1e-5
    assert relative_difference(model_of(plain), model_of(train(tmp_path / "c", "allreduce", **changes))) > 1e-3


@pytest.mark.parametrize("strategy", ["sparknet", "iterative-reduce", "onebit", "allreduce + topk(0.1)"])
def test_one_worker_alone_is_plain_sgd(tmp_path, strategy):
    alone = train(tmp_path / "a", strategy, workers=1)
    assert same_bits(model_of(alone), model_of(train(tmp_path / "b", "allreduce", workers=1)))


@pytest.mark.parametrize("name", [p.name for p in PRESETS.values()])
def test_every_preset_learns_digits_with_four_workers(tmp_path, name):
    result = syncline.train(
        model="mlp(hidden=(64,))", data="digits", workers=4, epochs=12, strategy=name, out=str(tmp_path), quiet=True
    )
    assert result.metrics["test/accuracy"] > 0.93


@pytest.mark.parametrize(
    "strategy", ["sparknet(4)", "diloco(steps=5)", "allreduce + topk(0.2)", "bmuf(steps=3) + onebit"]
)
def test_a_stopped_run_goes_on_with_the_same_bits_whatever_the_workers_hold_for_themselves(tmp_path, strategy):
    changes = {"optimizer": syncline.sgd(lr=0.05, momentum=0.9), "epochs": 5}
    whole = train(tmp_path / "whole", strategy, model=InterruptAt(small_net(), -1, tmp_path / "no"), **changes)
    with pytest.raises(syncline.Interrupted):
        train(tmp_path / "cut", strategy, model=InterruptAt(small_net(), 13, tmp_path / "flag"), **changes)
    (run_dir,) = (p.parent for p in (tmp_path / "cut").glob("*/plan.json"))
    assert 13 <= final_state(run_dir)["position"]["step"] < 45
    assert same_bits(model_of(syncline.resume(run_dir, quiet=True)), model_of(whole))


@pytest.mark.parametrize("codec", ["exact", "bf16", "int8", "onebit", "topk(0.01)"])
def test_the_bytes_that_are_sent_are_those_of_theory(tmp_path, codec):
    torch.manual_seed(0)
    wide = torch.nn.Sequential(torch.nn.Linear(12, 3000), torch.nn.Linear(3000, 3))
    parameters = sum(p.numel() for p in wide.parameters())
    result = train(tmp_path, f"allreduce + {codec}", workers=2, model=wide, evaluate_every=0, epochs=2)
    sent = sum(e.bytes_sent for e in RunDir(result.run_dir).read_events() if isinstance(e, Progress) and e.rank == 1)
    in_theory = bytes_per_exchange(read_strategy(f"allreduce + {codec}"), parameters) * result.steps
    assert sent == pytest.approx(in_theory, rel=0.02)
    times_less = 4 * parameters * result.steps / sent
    assert times_less > {"onebit": 25, "topk(0.01)": 40}.get(codec, 0.9)


def test_workers_that_train_by_themselves_have_batch_norm_statistics_of_their_own(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
    changes = {"model": net, "workers": 2, "evaluate_every": 0, "epochs": 2}
    states = [
        model_of(train(tmp_path / rule, "sparknet(3)", batch_norm=rule, **changes)) for rule in ("global", "local")
    ]
    assert same_bits(*states), "between exchanges there is no global batch to take statistics of"
