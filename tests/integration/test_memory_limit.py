"""Memory in real runs: the peak is told, the limit holds, and saving memory does not change the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from real_runs import final_state, relative_difference
from real_runs import syncline as command
from torch import nn

import syncline
from syncline.lab import faults
from syncline.telemetry.events import InfoMessage
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("memory_limit")  # one process, because these tests share a fixture

SAMPLES = 512
KEPT_BACK = 40e6
"""What the allocator keeps of what was freed differs from run to run; still less than what the limit saves."""


def image_net() -> nn.Module:
    """Few weights, large activations: half a megabyte for a sample."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def train(tmp_path: Path, **changes: object) -> syncline.Result:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 1, 32, 32, generator=generator)
    data = (images, (images[:, 0, 0, 0] > 0).long() + (images[:, 0, 1, 1] > 0).long())
    settings: dict[str, object] = {
        "model": image_net(), "data": data, "test": data, "batch": SAMPLES, "epochs": 3, "workers": 2,
        "optimizer": syncline.sgd(lr=0.05, momentum=0.9), "out": str(tmp_path), "quiet": True, "tune": "off", **changes,
    }  # fmt: skip
    return syncline.train(**settings)  # type: ignore[arg-type]


def micro_batches(result: syncline.Result) -> list[dict[str, int]]:
    """What was found for each View."""
    notes = [e for e in RunDir(result.run_dir).read_events() if isinstance(e, InfoMessage)]
    return [n.details["memory"] for n in notes if "memory" in n.details]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> syncline.Result:
    return train(tmp_path_factory.mktemp("plain"))


def test_every_workers_peak_is_told(plain):
    assert sorted(plain.peak_memory_bytes) == [0, 1]
    assert all(peak > 100e6 for peak in plain.peak_memory_bytes.values())
    summary = json.loads((plain.run_dir / "summary.json").read_text())
    assert summary["peak_memory_bytes"] == {str(n): peak for n, peak in plain.peak_memory_bytes.items()}


def test_under_a_limit_the_peak_stays_and_the_result_is_the_same(tmp_path, plain):
    limit = int(max(plain.peak_memory_bytes.values()) - 80e6)
    result = train(tmp_path, memory_limit=limit / 1e6)
    (found,) = micro_batches(result)
    assert found["count"] > 1
    assert found["samples"] < SAMPLES // 2
    assert max(result.peak_memory_bytes.values()) <= limit + KEPT_BACK
    assert relative_difference(final_state(plain.run_dir)["model"], final_state(result.run_dir)["model"]) < 1e-4
    assert result.metrics["test/loss"] == pytest.approx(plain.metrics["test/loss"], rel=1e-4)


def test_when_a_worker_is_lost_the_larger_shares_of_the_others_stay_within_the_limit(tmp_path, plain, monkeypatch):
    for name, value in faults.install("kill worker 1 at step 2").items():
        monkeypatch.setenv(name, value)
    limit = int(max(plain.peak_memory_bytes.values()) - 80e6)
    result = train(tmp_path, memory_limit=limit / 1e6, on_worker_failure="shrink")
    before, after = micro_batches(result)
    assert after["count"] > before["count"]
    assert after["expected_bytes"] <= limit
    assert list(result.peak_memory_bytes) == [0]
    assert result.peak_memory_bytes[0] <= limit + KEPT_BACK


def test_a_limit_below_what_one_sample_needs_is_told_with_what_helps(tmp_path):
    done = command(
        "train", "mlp", "--data", "digits", "--memory-limit", "10MB", "--max-steps", "2", "--out", str(tmp_path),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 1
    assert "memory_limit is 10 MB, but a worker needs about" in done.err
    assert "--checkpoint-activations" in done.err
    assert "Traceback" not in done.err


def test_what_is_too_large_for_one_worker_is_trained_by_two_that_hold_it_together(tmp_path):
    # 18 million parameters with AdamW: 293 MB of state, of which each of two workers has a half.
    words = (
        "train", "mlp(hidden=[3000, 3000, 3000])", "--data", "digits", "--optimizer", "adamw", "--max-steps", "3",
        "--batch", "16", "--tune", "off", "--evaluate-every", "0", "--memory-limit", "480MB", "--out", str(tmp_path),
    )  # fmt: skip
    alone = command(*words, cwd=tmp_path)
    assert alone.code == 1
    assert "memory_limit is 480 MB, but a worker needs about" in alone.err
    for layout in ("sharded", "pipeline(2)"):
        done = command(*words, "--layout", layout, "--json", cwd=tmp_path, is_warm=False)  # which holds less
        assert done.code == 0, done.err
        assert all(peak < 480e6 for peak in done.events[-1]["peak_memory_bytes"].values()), layout


def test_with_one_flag_activations_are_recomputed_and_the_bits_are_the_same(tmp_path):
    states = []
    for flag in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.BatchNorm1d(16),
            nn.ReLU(), nn.Linear(16, 3),
        )  # fmt: skip
        images = torch.randn(103, 64, generator=torch.Generator().manual_seed(2))
        data = (images, (images[:, 0] > 0).long() + (images[:, 1] > 0).long())
        result = train(
            tmp_path / str(flag), model=net, data=data, test=data, batch=20, epochs=3, checkpoint_activations=flag
        )
        states.append(final_state(result.run_dir)["model"])
    assert list(states[0]) == list(states[1])
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name


def test_batch_norm_in_pieces_waits_for_nobody_when_shares_are_unequal(tmp_path):
    net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    images = torch.randn(23, 64, generator=torch.Generator().manual_seed(2))
    data = (images, (images[:, 0] > 0).long())
    # Shares of 3 and 2, in up to three pieces each; those of the last batch are 2 and 1.
    result = train(tmp_path, model=net, data=data, test=data, batch=5, epochs=2, accumulate=3)
    assert result.steps == 10


def test_the_command_tells_the_peak_and_takes_the_flags(tmp_path):
    done = command(
        "train", "mlp", "--data", "digits", "--epochs", "1", "--checkpoint-activations", "--memory-limit", "4GB",
        "--tune", "off", "--out", str(tmp_path), cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "peak memory: " in done.out
    assert "peak memory: " in done.out
    assert "of 4,000 MB" in done.out


def test_an_autoencoder_is_trained_on_data_that_has_classes(tmp_path):
    done = command(
        "train", "autoencoder(hidden=[32, 8])", "--data", "digits", "--epochs", "4", "--json", "--out", str(tmp_path),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    summary = done.events[-1]
    assert sorted(summary["metrics"]) == ["test/loss", "train/loss"]
    assert summary["metrics"]["test/loss"] < 0.2
    assert len(summary["peak_memory_bytes"]) == 2
