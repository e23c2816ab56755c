"""DeSTIN in real runs: sums over any number of workers, killed workers, features for another model."""

from __future__ import annotations

import pytest
import torch
from real_runs import final_state, relative_difference, same_bits
from real_runs import syncline as command

import syncline
from syncline.observe.report.load import load
from syncline.observe.report.report_page import as_html
from syncline.telemetry.centroids import read_centroids
from syncline.telemetry.events import WorkerFailure
from syncline.telemetry.run_dir import RunDir

SMALL = {"grid": (4, 2, 1), "centroids": 10, "shared": False, "movements": 1}


def fit(out, workers=2, options=SMALL, **settings):
    given = {"data": "digits", "epochs": 3, "batch": 50, "quiet": True, "out": str(out), **settings}
    return syncline.Destin(**options).fit(workers=workers, **given)


@pytest.mark.parametrize(
    "more",
    [{}, {"shared": True, "memory": "table", "movements": 2, "training": "concurrent"}],
    ids=["greedy", "shared, with a table"],
)
def test_one_two_and_four_workers_find_the_same_centroids_to_rounding(tmp_path, more):
    found = [fit(tmp_path / str(n), n, {**SMALL, **more}) for n in (1, 2, 4)]
    alone, *others = (final_state(beliefs.run_dir)["model"] for beliefs in found)
    assert alone["layers.0.cells"].dtype == torch.float64
    assert max(relative_difference(alone, other) for other in others) < 1e-12


def test_a_worker_that_is_killed_changes_no_bit_if_it_is_replaced(tmp_path):
    words = [
        "train", "destin(grid=(4, 2, 1), centroids=10, movements=2)", "--data", "digits", "--workers", "2",
        "--epochs", "3", "--batch", "50", "--on-worker-failure", "replace-only", "--name",
    ]  # fmt: skip
    for name, faults in (
        ("whole", {}),
        ("killed", {"SYNCLINE_FAULTS": "kill worker 1 at step 20; kill worker 0 at step 60"}),
    ):
        done = command(*words, name, cwd=tmp_path, env=faults)
        assert done.code == 0, done.out + done.err
    events = RunDir(tmp_path / "runs" / "killed").read_events()
    assert sum(isinstance(event, WorkerFailure) for event in events) == 2
    whole, killed = (final_state(tmp_path / "runs" / name)["model"] for name in ("whole", "killed"))
    assert same_bits(whole, killed)


def test_a_worker_that_is_killed_and_not_replaced_costs_nothing_but_rounding(tmp_path):
    words = [
        "train", "destin(grid=(4, 2, 1), centroids=10, movements=2)", "--data", "digits", "--workers", "3",
        "--epochs", "3", "--batch", "50", "--on-worker-failure", "shrink", "--name",
    ]  # fmt: skip
    for name, faults in (("whole", {}), ("killed", {"SYNCLINE_FAULTS": "kill worker 1 at step 20"})):
        done = command(*words, name, cwd=tmp_path, env=faults)
        assert done.code == 0, done.out + done.err
    whole, killed = (final_state(tmp_path / "runs" / name)["model"] for name in ("whole", "killed"))
    assert relative_difference(whole, killed) < 1e-12
    audit = command("audit", "runs/killed", cwd=tmp_path)
    assert audit.code == 0, audit.out


def test_beliefs_are_the_data_of_another_model(tmp_path):
    beliefs = fit(tmp_path)
    found = read_centroids(RunDir(beliefs.run_dir).centroids)
    assert [len(layer.pictures) for layer in found.layers] == [10, 10, 10]
    assert [layer.pictures[0].width for layer in found.layers] == [2, 4, 8]
    assert "Layer 3, node 1 of 1" in as_html(load([beliefs.run_dir], lambda _: False))
    features = beliefs.features("digits")
    assert len(features) == 1437
    values, _ = features.fetch(range(1437))
    assert values.dtype == torch.float32
    assert values.mean(0).abs().max() < 0.02  # standardized
    settings = {"model": "mlp(hidden=(64,))", "workers": 2, "quiet": True, "out": str(tmp_path)}
    result = syncline.train(data=features, epochs=8, **settings)
    assert result.metrics["test/accuracy"] > 0.9
    task = RunDir(result.run_dir).task_file
    assert task.stat().st_size < 100_000, "the features stay in their own file"
    few = features.first(200)
    assert len(few) == 200
    assert torch.equal(few.fetch([3])[0], features.fetch([3])[0])
    again = syncline.Beliefs(beliefs.run_dir)
    assert torch.equal(again.centroids(0), beliefs.centroids(0))
    with pytest.raises(syncline.DataError) as caught:
        beliefs.features((torch.rand(5, 1, 16, 16), torch.arange(5)))
    assert caught.value.code == "another-shape"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"strategy": "sparknet"}, "strategy"),
        ({"strategy": "server-async"}, "strategy"),
        ({"strategy": "onebit"}, "strategy"),
        ({"layout": "sharded"}, "layout"),
        ({"optimizer": syncline.adam()}, "optimizer"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"loss": "mse_loss"}, "loss"),
    ],
)
def test_what_makes_no_sense_for_sums_is_refused_before_the_start(tmp_path, settings, name):
    with pytest.raises(syncline.ConfigError) as caught:
        fit(tmp_path / "runs", **settings)
    assert caught.value.code == "learns-by-sums"
    assert caught.value.facts["setting"] == name
    assert not (tmp_path / "runs").exists()


def test_images_that_are_not_numbers_end_the_run_with_the_reason(tmp_path):
    images = torch.rand(60, 1, 8, 8)
    images[7, 0, 2, 2] = float("nan")
    with pytest.raises(syncline.SynclineError, match=r"NaN or infinite.*[Rr]eplace them"):
        fit(tmp_path, data=images, batch=20)
