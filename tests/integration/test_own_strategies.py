"""Strategies of the user's own in real runs: they survive killed workers and have what built-in ones have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_runs import SignalAt, final_state, same_bits, samples, small_net

import syncline
from syncline.data.audit import audit_file
from syncline.telemetry.events import StrategySwitched, WorkerFailure
from syncline.telemetry.run_dir import RunDir

CLIPPED = Path(__file__).parents[2] / "examples" / "clipped.py"
PUSH, SUM = f"{CLIPPED}:ClippedPush(limit=1.0)", f"{CLIPPED}:ClippedSum(limit=1.0)"


def train(folder: Path, strategy: str, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "model": small_net(), "data": samples(), "batch": 12, "epochs": 4, "workers": 3,
        "optimizer": syncline.sgd(lr=0.05), "out": str(folder), "quiet": True, **changes,
    }  # fmt: skip
    return syncline.train(strategy=strategy, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        (PUSH, 3),
        (SUM, 3),
        (f"hierarchy(inside_host={SUM}, across_hosts=updates | every(3))", 4),
        (f"{PUSH} until step 6, then {SUM}", 3),
    ],
    ids=["server", "lock-step", "hierarchy", "switch"],
)
def test_a_killed_worker_costs_no_sample(tmp_path, strategy, workers):
    model = SignalAt(small_net(), [(7, 1), (16, 0)], tmp_path / "killed")
    result = train(tmp_path / "runs", strategy, model=model, workers=workers)
    failures = [e for e in RunDir(result.run_dir).read_events() if isinstance(e, WorkerFailure)]
    audit = audit_file(RunDir(result.run_dir).ledger)
    assert len(failures) == 2
    assert audit.is_clean, audit
    assert audit.is_complete
    assert result.epochs == 4


def test_a_strategy_that_declares_lock_step_has_global_batch_norm(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
    changes = {"model": net, "batch_norm": "global", "evaluate_every": 0, "epochs": 2}
    own, built_in = (
        final_state(train(tmp_path / str(i), strategy, **changes).run_dir)["model"]
        for i, strategy in enumerate((f"{CLIPPED}:ClippedSum(limit=inf)", "allreduce"))
    )
    assert same_bits(own, built_in), "without a limit, clipping changes nothing"


def test_a_switch_between_own_and_built_in_strategies_is_reported(tmp_path):
    result = train(tmp_path, f"{SUM} until epoch 1, then sparknet(2)", workers=2)
    (switch,) = [e for e in RunDir(result.run_dir).read_events() if isinstance(e, StrategySwitched)]
    assert (switch.step, switch.strategy) == (9, "updates | every(steps=2) | everyone | exact")


def test_a_mistake_in_ones_own_strategy_is_reported_before_a_process_starts(tmp_path):
    with pytest.raises(syncline.UnknownName) as caught:
        train(tmp_path, f"{CLIPPED}:ClippedSums")
    assert "ClippedSum" in caught.value.facts["nearest"]
    assert not list(tmp_path.glob("*/plan.json"))
