"""`syncline plan` and `syncline.plan` measure a model for real, and leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_runs import syncline as command

import syncline
from syncline.errors import ConfigError
from syncline.measuring import hosts_asked

pytestmark = pytest.mark.slow


def test_a_plan_measures_the_model_and_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    plan = syncline.plan(
        model="mlp", data="digits", workers=2, strategies=["allreduce", "sparknet(5)"], seconds=0.5, say=said.append,
        layout="sharded", layouts=["pipeline(2)"],
    )  # fmt: skip
    assert plan.best.strategy == "allreduce"
    assert {(each.strategy, each.layout) for each in plan.predictions} == {
        ("allreduce", "replicated"), ("allreduce", "sharded"), ("allreduce", "pipeline(2)"),
        ("sparknet(5)", "replicated"),
    }  # fmt: skip
    assert "waiting" in plan.why("allreduce", "pipeline(2)")
    assert plan.best.samples_per_s.mid > 0
    assert plan.best.bytes_per_step % 4 == 0
    assert plan.best.bytes_per_step > 10_000
    assert plan.best.memory_bytes.mid > 50e6
    assert {term.name for term in plan.best.terms} >= {"forward", "backward", "update", "exchange"}
    assert any("Measuring" in line for line in said)
    assert not any(tmp_path.iterdir())


def test_a_run_keeps_what_was_predicted_of_it_and_shows_what_came(tmp_path: Path):
    done = command("train", "mlp", "--data", "digits", "--workers", "2", "--epochs", "150", "--name", "a", "--quiet",
                   "--tune", "off", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.err
    shown = command("plan", "runs/a", cwd=tmp_path)
    assert shown.code == 0, shown.err
    assert {line.split()[0] for line in shown.out.splitlines() if line} >= {"forward", "exchange", "step", "bytes/step"}
    found = json.loads(command("plan", "runs/a", "--json", cwd=tmp_path).out)
    assert found["expected"]["terms"], "from its first steps, or from an earlier test that trained the same"
    assert abs(found["compared"]["bytes/step"]["error"]) < 0.01
    assert found["compared"]["step"]["came"] > 0
    assert command("report", "runs/a", "--no-tensorboard", cwd=tmp_path).code == 0
    assert "Prediction and fact" in (tmp_path / "runs" / "a" / "report.html").read_text()


def test_the_command_prints_a_simulation_as_json(tmp_path: Path):
    done = command("simulate", "mlp", "--data", "digits", "--workers", "2,500", "--step", "40ms", "--steps", "50",
                   "--strategy", "allreduce; ssp(bound=2)", "--stragglers", "lognormal(0.3)", "--json",
                   cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(done.out)["results"]
    assert [(each["strategy"], each["workers"]) for each in found] == [
        ("allreduce", 2), ("allreduce", 500), ("ssp(bound=2)", 2), ("ssp(bound=2)", 500),
    ]  # fmt: skip
    assert max(map(int, found[3]["staleness"])) <= 2


@pytest.mark.parametrize(
    ("hosts", "network", "meant"), [(None, None, 1), (None, "1gbit", 4), (2, "1gbit", 2), (2, None, 2)]
)
def test_a_network_is_between_hosts(hosts, network, meant):
    assert hosts_asked(hosts, network, workers=4) == meant


def test_what_cannot_be_planned_is_refused_before_anything_runs():
    with pytest.raises(ConfigError) as raised:
        syncline.plan(model="mlp", data="digits", workers=3, hosts=2)
    assert raised.value.code == "hosts"
    with pytest.raises(ConfigError) as raised:
        syncline.plan(model="mlp", data="digits", workers=2, hosts=2, layouts=["sharded"])
    assert raised.value.code == "plan-layout"
    with pytest.raises(ConfigError) as raised:
        syncline.plan(model="mlp", data="digits", workers=2, hosts=1, network="100mbit")
    assert raised.value.code == "hosts"
    with pytest.raises(ConfigError):
        syncline.plan(model="mlp", data="digits", workers=2, layouts=["shredded"])
