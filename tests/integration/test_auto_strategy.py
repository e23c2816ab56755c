"""`--strategy auto` in real runs: the run trains with a strategy by name, and keeps it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from real_runs import syncline as command

import syncline
from syncline.config.run import RunConfig
from syncline.config.spec import Spec
from syncline.data.audit import audit_file
from syncline.driver import explain_task, run_script, run_task
from syncline.errors import ConfigError
from syncline.observe.observer import JsonLines
from syncline.planning.adviser import Advice
from syncline.planning.plan import Plan
from syncline.task import Script, Task
from syncline.telemetry.events import Event, InfoMessage, Progress, RunEnded, RunStarted
from syncline.telemetry.run_dir import RunDir


@pytest.mark.slow
def test_a_run_trains_with_the_strategy_that_was_chosen_and_resumes_with_it(tmp_path: Path):
    done = command("train", "mlp", "--data", "digits", "--workers", "2", "--strategy", "auto(exact)", "--json",
                   "--max-steps", "30", "--name", "a", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "a"
    chosen = json.loads((run / "plan.json").read_text())["strategy"]
    assert chosen in ("allreduce", "server-sync")
    assert json.loads((run / "config.json").read_text())["strategy"] == chosen
    said = [event["message"] for event in done.events if event["event"] == "info"]
    assert any(f"auto(exact) chose {chosen}" in message for message in said)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"a"}, "measuring leaves nothing behind"

    (run / "summary.json").unlink()  # as if it had been interrupted
    again = command("train", "mlp", "--data", "digits", "--workers", "2", "--strategy", "auto", "--json",
                    "--max-steps", "40", "--resume", "auto", cwd=tmp_path)  # fmt: skip
    assert again.code == 0, again.err
    assert any(event.get("resumed_from_step") == 30 for event in again.events)
    assert json.loads((run / "plan.json").read_text())["strategy"] == chosen
    assert not any("Measuring" in event.get("message", "") for event in again.events)


@pytest.mark.parametrize("changes", [
    {"strategy": "auto(fast)"}, {"strategy": "auto", "engine": "ray"}, {"strategy": "auto", "layout": "sharded"},
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused_before_anything_starts(tmp_path, changes):
    task = Task(model=Spec("mlp"), data=Spec("digits"))
    with pytest.raises(ConfigError) as raised:
        run_task(task, RunConfig(workers=2, out=str(tmp_path), **changes), JsonLines(io.StringIO()))
    assert raised.value.code == "auto-strategy"
    assert not list(tmp_path.iterdir())


def test_scripts_dry_runs_and_resumed_runs_name_their_strategy(tmp_path):
    task = Task(model=Spec("mlp"), data=Spec("digits"))
    with pytest.raises(ConfigError) as raised:
        explain_task(task, RunConfig(strategy="auto"))
    assert raised.value.facts["reason"] == "dry-run"
    with pytest.raises(ConfigError) as raised:
        run_script(Script("loop.py", ()), RunConfig(strategy="auto"), JsonLines(io.StringIO()))
    assert raised.value.facts["reason"] == "own-loop"
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "task.bin").write_bytes(b"")
    with pytest.raises(ConfigError) as raised:
        syncline.resume(tmp_path, strategy="auto")
    assert raised.value.facts["reason"] == "resume"


def test_a_network_that_cannot_be_read_is_refused_before_anything_starts(tmp_path):
    task = Task(model=Spec("mlp"), data=Spec("digits"))
    with pytest.raises(ConfigError) as raised:
        run_task(task, RunConfig(workers=2, network="fast", out=str(tmp_path)), JsonLines(io.StringIO()))
    assert raised.value.code == "network"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_adapts_switches_and_uses_every_sample_once(tmp_path, monkeypatch):
    class Advises:
        """Advises once, at the 30th step."""

        def __init__(self, plan: Plan, *_: object) -> None:
            self.current = plan.strategy

        def on_event(self, event: Event) -> Advice | None:
            if isinstance(event, Progress) and event.step >= 30 and self.current != "sparknet(3)":
                return Advice(strategy="sparknet(3)", step=event.step, text="It is quicker.")
            return None

    def chosen(task, config, *_, **__):
        return config.replace(strategy="allreduce"), ("allreduce was chosen.",)

    monkeypatch.setattr("syncline.driver.Adviser", Advises)
    monkeypatch.setattr("syncline.driver.choose", chosen)
    result = syncline.train(model="mlp", data="digits", workers=2, epochs=60, strategy="auto(adapt)", tune="off",
                            out=str(tmp_path), name="a", quiet=True)  # fmt: skip
    assert result.epochs == 60
    events = list(RunDir(tmp_path / "a").read_events())
    started = [event for event in events if isinstance(event, RunStarted)]
    assert [event.plan["strategy"] for event in started] == ["allreduce", "sparknet(3)"]
    assert started[1].resumed_from_step >= 30
    assert not any(isinstance(event, RunEnded) for event in events)
    assert any("auto(adapt) switched" in event.message for event in events if isinstance(event, InfoMessage))
    assert audit_file(tmp_path / "a" / "ledger.jsonl").is_clean
