"""Interrupted and resumed runs are bit-identical: no sample is lost or repeated."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from real_runs import InterruptAt, final_state, same_bits, samples, small_net
from torch import nn

import syncline
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("resume")  # one process, because these tests share a fixture

STEPS = 60  # 6 epochs of 10 steps


def net_with_dropout() -> nn.Module:
    net = small_net()
    return nn.Sequential(net[0], nn.Dropout(0.3), *net[1:])  # type: ignore[index]  # small_net is a Sequential


def settings(out: Path, model: nn.Module, **changes: object) -> dict[str, object]:
    return {
        "model": model, "data": samples(), "test": samples(57, seed=2), "batch": 11, "epochs": 6, "workers": 2,
        "optimizer": "adam(lr=0.01)", "schedule": "OneCycleLR", "out": str(out), "quiet": True, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole")
    model = InterruptAt(net_with_dropout(), step=-1, flag=folder / "flag")
    return final_state(syncline.train(**settings(folder, model)).run_dir)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(10))
def test_a_run_stopped_with_ctrl_c_anywhere_ends_with_the_same_bits(tmp_path, uninterrupted, place):
    step = random.Random(place).randrange(1, STEPS)
    model = InterruptAt(net_with_dropout(), step=step, flag=tmp_path / "flag")
    with pytest.raises(syncline.Interrupted, match=r"saved.*syncline resume"):
        syncline.train(**settings(tmp_path, model))
    (run_dir,) = (p.parent for p in tmp_path.glob("*/plan.json"))
    stopped_at = final_state(run_dir)["position"]["step"]
    assert step <= stopped_at < STEPS, f"asked at step {step}"

    result = syncline.resume(run_dir, quiet=True)

    assert result.run_dir == run_dir
    assert result.steps == STEPS
    state = final_state(run_dir)
    assert same_bits(state["model"], uninterrupted["model"])
    assert state["metrics"] == uninterrupted["metrics"]
    for name, slots in uninterrupted["optimizer"]["state"].items():
        assert same_bits(
            {k: torch.as_tensor(v) for k, v in slots.items()},
            {k: torch.as_tensor(v) for k, v in state["optimizer"]["state"][name].items()},
        )


def test_the_same_command_with_resume_auto_goes_on_with_the_unfinished_run(tmp_path, uninterrupted):
    model = InterruptAt(net_with_dropout(), step=17, flag=tmp_path / "flag")
    with pytest.raises(syncline.Interrupted):
        syncline.train(**settings(tmp_path, model))
    result = syncline.train(**settings(tmp_path, model, resume="auto"))
    assert same_bits(final_state(result.run_dir)["model"], uninterrupted["model"])
    assert len(list(tmp_path.glob("*/plan.json"))) == 1
    # A finished run is not gone on with: the same command then starts a new one.
    again = syncline.train(**settings(tmp_path, model, resume="auto", max_steps=2))
    assert again.run_dir != result.run_dir


def test_a_run_can_go_on_with_another_number_of_workers_and_more_epochs(tmp_path):
    model = InterruptAt(small_net(), step=23, flag=tmp_path / "flag")
    with pytest.raises(syncline.Interrupted):
        syncline.train(**settings(tmp_path, model, schedule=None, optimizer=syncline.sgd(lr=0.05)))
    (run_dir,) = (p.parent for p in tmp_path.glob("*/plan.json"))
    result = syncline.resume(run_dir, quiet=True, workers=3, epochs=7)
    assert result.steps == 70
    assert RunDir(run_dir).read_plan()["epochs"] == 7
    whole = syncline.train(
        **settings(tmp_path / "whole", InterruptAt(small_net(), -1, tmp_path / "no"), schedule=None, epochs=7,
                   optimizer=syncline.sgd(lr=0.05))
    )  # fmt: skip
    for name, tensor in final_state(whole.run_dir)["model"].items():
        torch.testing.assert_close(final_state(run_dir)["model"][name], tensor, rtol=1e-5, atol=1e-7)


def test_a_damaged_newest_checkpoint_is_named_and_an_earlier_one_used(tmp_path, uninterrupted):
    model = InterruptAt(net_with_dropout(), step=30, flag=tmp_path / "flag")
    with pytest.raises(syncline.Interrupted):
        syncline.train(**settings(tmp_path, model, checkpoint_every_steps=7))
    (run_dir,) = (p.parent for p in tmp_path.glob("*/plan.json"))
    newest = max((run_dir / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    result = syncline.resume(run_dir, quiet=True)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    warnings = [e["message"] for e in events if e["event"] == "warning"]
    assert any(newest.name in w and "truncated" in w for w in warnings)
    assert same_bits(final_state(result.run_dir)["model"], uninterrupted["model"])


def test_a_run_whose_only_checkpoint_is_damaged_says_so_and_stays_as_it_is(tmp_path):
    model = InterruptAt(small_net(), step=5, flag=tmp_path / "flag")
    with pytest.raises(syncline.Interrupted):
        syncline.train(**settings(tmp_path, model))
    (run_dir,) = (p.parent for p in tmp_path.glob("*/plan.json"))
    (checkpoint,) = (run_dir / "checkpoints").glob("*.pt")
    damaged = bytearray(checkpoint.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    checkpoint.write_bytes(damaged)
    with pytest.raises(syncline.CheckpointError, match=r"corrupt.*start a new run"):
        syncline.resume(run_dir, quiet=True)
    assert checkpoint.read_bytes() == bytes(damaged)


def test_a_folder_that_is_no_run_is_refused_with_the_runs_inside_it(tmp_path):
    with pytest.raises(syncline.ConfigError, match="is not a run directory"):
        syncline.resume(tmp_path, quiet=True)
