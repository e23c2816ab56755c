"""Checkpoints of real runs whose state is too large to copy: whole, and with the same content as before."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import final_state, my_rank, same_bits, samples
from torch import nn

import syncline
from syncline.checkpoint.store import checkpoints_in
from syncline.data.audit import audit_file
from syncline.errors import SynclineError
from syncline.telemetry.run_dir import RunDir


class WideNet(nn.Module):
    """Five million parameters. With a `flag`, rank 0 is killed in the middle of its second checkpoint, once."""

    def __init__(self, flag: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 1000), nn.ReLU(), nn.Linear(1000, 5000), nn.ReLU(), nn.Linear(5000, 3))
        self.flag, self.calls = str(flag) if flag is not None else None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.flag is not None and self.calls == 4 and my_rank() == 0:
            _die_while_saving(self.flag)
        out: torch.Tensor = self.net(x)
        return out


def _die_while_saving(flag: str) -> None:
    save = torch.save

    def die(state: Any, file: Any) -> None:
        if not isinstance(file, io.BytesIO) and not os.path.exists(flag):  # in memory: what workers send each other
            Path(flag).touch()
            save(state["model"], file)  # about half of it
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, file)

    torch.save = die


def settings(out: Path, model: nn.Module, layout: str) -> dict[str, Any]:
    return {
        "model": model, "data": samples(), "batch": 10, "epochs": 1, "max_steps": 8, "workers": 2, "layout": layout,
        "optimizer": syncline.sgd(lr=0.05, momentum=0.9), "checkpoint_every_steps": 2, "checkpoint_every_s": 1e6,
        "keep_checkpoints": 9, "evaluate_every": 0, "tune": "off", "out": str(out), "quiet": True,
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_worker_killed_in_the_middle_of_a_checkpoint_leaves_one_from_which_the_run_resumes_exactly(tmp_path, layout):
    whole = syncline.train(**settings(tmp_path / "whole", WideNet(), layout))
    flag = tmp_path / "flag"
    with pytest.raises(SynclineError):
        syncline.train(**settings(tmp_path / "killed", WideNet(flag), layout), on_worker_failure="stop")
    assert flag.exists(), "it was killed while it saved"
    (run_dir,) = (p.parent for p in (tmp_path / "killed").glob("*/plan.json"))
    assert 0 < final_state(run_dir)["position"]["step"] < 8

    resumed = syncline.resume(run_dir, quiet=True)

    assert resumed.steps == 8
    expected, state = final_state(whole.run_dir), final_state(run_dir)
    assert same_bits(state["model"], expected["model"])
    for number, slots in expected["optimizer"]["state"].items():
        assert same_bits(state["optimizer"]["state"][number], slots)
    found = audit_file(RunDir(run_dir).ledger)
    assert found.is_clean
    assert found.is_complete
    assert not list(RunDir(run_dir).checkpoints.glob(".*")), "nothing half-written is left"


def test_a_checkpoint_has_the_same_tensors_and_size_in_every_layout(tmp_path):
    results = [syncline.train(**settings(tmp_path / name, WideNet(), name)) for name in ("replicated", "sharded")]
    sizes = [checkpoints_in(RunDir(result.run_dir).checkpoints)[-1].size_bytes for result in results]
    parameters = sum(p.numel() for p in WideNet().parameters())
    assert all(2 * 4 * parameters < size < 2 * 4 * parameters + 50_000 for size in sizes), "each number once"
    states = [final_state(result.run_dir) for result in results]
    assert list(states[0]["model"]) == list(states[1]["model"])
    for name, tensor in states[0]["model"].items():
        torch.testing.assert_close(tensor, states[1]["model"][name], rtol=1e-4, atol=1e-6)
