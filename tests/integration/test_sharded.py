"""`--layout sharded`: the same result as when each worker holds all, also after kills; checkpoints know no layout."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import SignalAt, final_state, relative_difference, same_bits, samples, small_net
from real_runs import syncline as command
from torch import nn

import syncline
from syncline.data.audit import audit_file
from syncline.errors import ConfigError
from syncline.telemetry.events import Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir


def train(folder: Path, model: Any, *, workers: int = 3, layout: str = "sharded", **changes: Any) -> syncline.Result:
    settings = {
        "data": samples(), "test": samples(57, seed=2), "batch": 10, "epochs": 4, "quiet": True, "out": str(folder),
        "optimizer": syncline.optimizer("adamw", lr=0.01), **changes,
    }  # fmt: skip
    return syncline.train(model=model, workers=workers, layout=layout, **settings)


def norm_net() -> nn.Module:
    """Batch norm, a layer that is used twice, one that is frozen, and a parameter that is a single number."""
    torch.manual_seed(0)
    return Odd()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.norm = nn.Linear(12, 16, bias=False), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.frozen, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.frozen(self.twice(self.twice(x))) * self.scale)


def assert_audited(result: syncline.Result) -> None:
    found = audit_file(RunDir(result.run_dir).ledger)
    assert found.is_clean, found
    assert found.is_complete


def failures(result: syncline.Result) -> int:
    return sum(isinstance(e, WorkerFailure) for e in RunDir(result.run_dir).read_events())


@pytest.mark.parametrize(("net", "changes"), [
    (norm_net, {}),
    (small_net, {"clip_norm": 0.05, "accumulate": 2, "optimizer": syncline.sgd(lr=0.1, momentum=0.9)}),
])  # fmt: skip
def test_the_result_is_that_of_one_process(tmp_path, net, changes):
    alone = train(tmp_path / "alone", net(), workers=1, layout="replicated", **changes)
    two = train(tmp_path / "two", net(), workers=2, **changes)
    three = train(tmp_path / "three", net(), workers=3, **changes)
    expected = final_state(alone.run_dir)
    for result in (two, three):
        state = final_state(result.run_dir)
        assert relative_difference(expected["model"], state["model"]) < 1e-5
        assert_same_optimizer(state["optimizer"], expected["optimizer"])
        assert result.metrics["test/loss"] == pytest.approx(alone.metrics["test/loss"], rel=1e-4)
        assert_audited(result)


def assert_same_optimizer(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(actual["state"][number][name], value, rtol=1e-3, atol=1e-6)


def test_with_replacements_the_result_is_the_same_to_the_bit_after_kills(tmp_path):
    whole = train(tmp_path / "whole", SignalAt(norm_net(), [], tmp_path / "none"))
    kills = [(3, 0), (6, 1), (9, 2), (11, 0)]
    model = SignalAt(norm_net(), kills, tmp_path / "k")
    killed = train(tmp_path / "killed", model, on_worker_failure="replace-only", max_failures=99)
    assert failures(killed) == 4
    assert same_bits(*(final_state(r.run_dir)["model"] for r in (whole, killed)))
    assert_audited(killed)


class DiesInUpdate(torch.optim.AdamW):
    """The first worker that comes to its fifth update leaves it half written, and is killed."""

    def __init__(self, params: Any, lr: float, flag: str) -> None:
        super().__init__(params, lr=lr)
        self.flag, self.updates = flag, 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.updates == 5:
            try:
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                for p in self.param_groups[0]["params"]:
                    p.data[: p.numel() // 2] = float("nan")
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


@pytest.mark.parametrize("policy", ["replace-only", "shrink-and-replace"])
def test_an_update_in_which_a_worker_is_killed_is_completed_by_another(tmp_path, policy):
    def optimizer(flag: Path) -> Any:
        return lambda parameters: DiesInUpdate(parameters, 0.01, str(flag))

    (tmp_path / "none").touch()
    whole = train(tmp_path / "whole", small_net(), optimizer=optimizer(tmp_path / "none"))
    killed = train(tmp_path / "killed", small_net(), optimizer=optimizer(tmp_path / "k"), on_worker_failure=policy)
    assert failures(killed) == 1
    models = [final_state(r.run_dir)["model"] for r in (whole, killed)]
    if policy == "replace-only":
        assert same_bits(*models)
    else:
        assert relative_difference(*models) < 1e-5
    assert_audited(killed)
    recovered = [e for e in RunDir(killed.run_dir).read_events() if isinstance(e, Recovered)]
    assert all(e.repeated_steps == e.repeated_samples == 0 for e in recovered)


def test_without_replacement_the_others_finish_even_if_one_is_left(tmp_path):
    model = SignalAt(small_net(), [(4, 2), (9, 0)], tmp_path / "k")
    result = train(tmp_path / "killed", model, on_worker_failure="shrink")
    alone = train(tmp_path / "alone", small_net(), workers=1, layout="replicated")
    expected, got = (final_state(r.run_dir)["model"] for r in (alone, result))
    assert relative_difference({f"net.{k}": v for k, v in expected.items()}, got) < 1e-5
    assert_audited(result)


def test_any_layout_and_number_of_workers_resume_a_checkpoint_of_any_other(tmp_path):
    whole = final_state(train(tmp_path / "whole", small_net(), workers=1, layout="replicated").run_dir)["model"]
    forms = [(2, "sharded"), (3, "sharded"), (2, "replicated"), (1, "sharded")]
    for number, (workers, layout) in enumerate(forms):
        first = train(tmp_path / f"first{number}", small_net(), workers=workers, layout=layout, max_steps=15)
        (others, other) = forms[(number + 1) % len(forms)]
        result = syncline.resume(first.run_dir, workers=others, layout=other, max_steps=None, quiet=True)
        assert relative_difference(whole, final_state(result.run_dir)["model"]) < 1e-5
        assert_audited(result)


def test_what_cannot_be_sharded_is_refused_with_the_nearest_that_can(tmp_path):
    for changes, reason in [
        ({"strategy": "sparknet"}, "one-replica"),
        ({"strategy": "onebit"}, "strategy"),
        ({"collective": "process-group"}, "no-shared-memory"),
    ]:
        with pytest.raises(ConfigError) as caught:
            train(tmp_path, small_net(), **changes)
        assert (caught.value.facts["reason"], caught.value.facts["nearest"]) == (reason, "replicated")
    assert not list(tmp_path.iterdir())


def test_the_command_line_explains_and_refuses(tmp_path):
    done = command("explain", "mlp", "--data", "digits", "--workers", "4", "--layout", "sharded", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "MB of parameters and gradients per worker instead of" in done.out
    for words, what in [
        (("train", "mlp", "--data", "digits", "--layout", "shardet"), "Did you mean 'sharded'?"),
        (("train", "mlp", "--data", "digits", "--layout", "sharded(3)"), "a replica takes 3 workers"),
        (("train", "mlp", "--data", "digits", "--layout", "sharded", "--optimizer", "lars"), "looks at whole ones"),
    ]:
        refused = command(*words, cwd=tmp_path)
        assert refused.code != 0
        assert what in refused.err
