"""`pipeline(n)` and `tensor(n)`, alone and in products: the same result as one process, also after kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import final_state, pid_of, relative_difference, same_bits, samples
from real_runs import syncline as command
from torch import nn

import syncline
from syncline import Pipeline, Sharded, Tensor
from syncline.data.audit import audit_file
from syncline.errors import ConfigError
from syncline.telemetry.events import WorkerFailure
from syncline.telemetry.run_dir import RunDir


class Branching(nn.Module):
    """A residual, an input that is used late, a layer that is used twice, in different stages, and a frozen one."""

    def __init__(self, *, normalizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(28, 3)
        self.norm = nn.BatchNorm1d(16) if normalizes else nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.twice(torch.relu(self.first(x))))
        h = h + self.frozen(self.norm(h)) * self.scale
        h = h + torch.relu(self.twice(h))
        out: torch.Tensor = self.last(torch.cat([h, x], dim=1))
        return out


def wide() -> nn.Module:
    """Layers that are large enough to be divided, of widths that do not divide evenly; batch norm and dropout.

    No bias before batch norm: its gradient is rounding error, which AdamW would make a step of.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 300, bias=False), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 201), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(201, 3),
    )  # fmt: skip


class KillingLoss:
    """Kills the worker with the rank `victim` in the middle of a step: when this one comes to a loss, once."""

    def __init__(self, kills: dict[int, int], flags: Path) -> None:
        self.kills, self.flags, self.calls = kills, str(flags), 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
            victim = self.kills.get(self.calls)
            if victim is not None:
                try:
                    os.close(os.open(f"{self.flags}-{self.calls}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(pid_of(victim), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)


def train(
    folder: Path, model: Any, *, workers: int = 2, layout: Any = "pipeline(2)", **changes: Any
) -> syncline.Result:
    settings = {
        "data": samples(), "test": samples(57, seed=2), "batch": 10, "epochs": 3, "quiet": True, "out": str(folder),
        "optimizer": syncline.optimizer("adamw", lr=0.01), "tune": "off", **changes,
    }  # fmt: skip
    return syncline.train(model=model, workers=workers, layout=layout, **settings)


def assert_audited(result: syncline.Result) -> None:
    audit = audit_file(RunDir(result.run_dir).ledger)
    assert audit.is_complete
    assert audit.is_clean


def failures(result: syncline.Result) -> int:
    return sum(isinstance(e, WorkerFailure) for e in RunDir(result.run_dir).read_events())


@pytest.mark.parametrize("normalizes", [False, True])
def test_the_result_is_that_of_one_process(tmp_path, normalizes):
    net = Branching(normalizes=normalizes)
    changes = {} if normalizes else {"clip_norm": 0.05}
    alone = train(tmp_path / "alone", net, workers=1, layout="replicated", **changes)
    expected = final_state(alone.run_dir)
    for number, (workers, layout) in enumerate([(2, Pipeline(2)), (3, "pipeline(3)"), (4, Pipeline(2) * Sharded(2))]):
        result = train(tmp_path / str(number), net, workers=workers, layout=layout, **changes)
        state = final_state(result.run_dir)
        assert relative_difference(expected["model"], state["model"]) < 1e-5, layout
        assert state["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
        assert result.metrics["test/loss"] == pytest.approx(alone.metrics["test/loss"], rel=1e-4)
        assert result.metrics["train/loss"] == pytest.approx(alone.metrics["train/loss"], rel=1e-4)
        assert_audited(result)


def test_layers_that_are_divided_give_the_result_of_one_process(tmp_path):
    alone = train(tmp_path / "alone", wide(), workers=1, layout="replicated")
    for number, (workers, layout) in enumerate([(3, Tensor(3)), (4, Pipeline(2) * Tensor(2)), (4, "tensor(2)")]):
        result = train(tmp_path / str(number), wide(), workers=workers, layout=layout)
        states = [final_state(r.run_dir)["model"] for r in (alone, result)]
        assert relative_difference(*states) < 1e-5, layout
        assert result.metrics["test/loss"] == pytest.approx(alone.metrics["test/loss"], rel=1e-4)
        assert_audited(result)


@pytest.mark.parametrize("normalizes", [False, True])
def test_with_replacements_the_result_is_the_same_to_the_bit_after_kills(tmp_path, normalizes):
    # Calls of the loss by one worker: a step has ten micro-batches, or one if batch norm needs the whole share.
    kills = {4: 0, 9: 1, 14: 0} if normalizes else {25: 0, 77: 1, 111: 0}
    whole, killed = (
        train(
            tmp_path / name, Branching(normalizes=normalizes), loss=KillingLoss(each, tmp_path / "k"),
            layout=Pipeline(2) if normalizes else Pipeline(2, micro_batches=10),
            on_worker_failure="replace-only", max_failures=99,
        )
        for name, each in (("whole", {}), ("killed", kills))
    )  # fmt: skip
    assert failures(killed) == 3
    assert same_bits(*(final_state(r.run_dir)["model"] for r in (whole, killed)))
    assert_audited(killed)


def test_a_worker_that_computes_slices_is_replaced_with_the_same_bits(tmp_path):
    whole, killed = (
        train(
            tmp_path / name, wide(), loss=KillingLoss(each, tmp_path / "k"), layout="tensor(2)",
            on_worker_failure="replace-only", max_failures=99,
        )
        for name, each in (("whole", {}), ("killed", {4: 1, 12: 0}))
    )  # fmt: skip
    assert failures(killed) == 2
    assert same_bits(*(final_state(r.run_dir)["model"] for r in (whole, killed)))
    assert_audited(killed)


def test_two_replicas_lose_workers_and_continue_with_the_places_that_can_be_filled(tmp_path):
    loss = KillingLoss({20: 1, 60: 0}, tmp_path / "k")
    killed = train(tmp_path / "killed", Branching(), workers=4, loss=loss, on_worker_failure="shrink")
    alone = train(tmp_path / "alone", Branching(), workers=1, layout="replicated")
    assert failures(killed) >= 2
    assert relative_difference(*(final_state(r.run_dir)["model"] for r in (alone, killed))) < 1e-5
    assert_audited(killed)


def test_any_layout_resumes_a_checkpoint_of_any_other(tmp_path):
    whole = final_state(train(tmp_path / "whole", Branching(), workers=1, layout="replicated").run_dir)["model"]
    forms = [(2, "pipeline(2)"), (2, "sharded"), (4, "pipeline(2) x sharded(2)"), (1, "replicated")]
    for number, (workers, layout) in enumerate(forms):
        first = train(tmp_path / f"first{number}", Branching(), workers=workers, layout=layout, max_steps=15)
        (others, other) = forms[(number + 1) % len(forms)]
        result = syncline.resume(first.run_dir, workers=others, layout=other, max_steps=None, quiet=True)
        assert relative_difference(whole, final_state(result.run_dir)["model"]) < 1e-5
        assert_audited(result)


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        (nn.Sequential(nn.Linear(12, 3)), "pipeline(2)", "too-many-stages"),
        (Branching(), "pipeline(2, cut=nowhere)", None),
        (Branching(), "pipeline(2, cut=twice+last)", "cut-count"),
        (Branching(), "tensor(2)", "nothing-to-divide"),
    ],
)
def test_a_cut_that_is_not_possible_is_refused_with_what_is(tmp_path, model, layout, reason):
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, model, layout=layout)
    assert caught.value.facts.get("reason") == reason


def test_the_command_line_trains_and_explains_a_pipeline(tmp_path):
    words = ("mlp", "--data", "digits", "--workers", "2", "--layout", "pipeline(2)")
    done = command("explain", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "Stage 0" in done.out
    assert "Stage 1" in done.out
    sliced = command("explain", *words[:-1], "tensor(2)", cwd=tmp_path)
    assert sliced.code == 0, sliced.err
    assert "divide" in sliced.out
    done = command("train", *words, "--epochs", "1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "pipeline(2)" in done.out
