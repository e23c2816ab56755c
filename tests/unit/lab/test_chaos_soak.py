"""Soak tests with simulated runs: rounds, shares of kills, failures, output."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.config.run import RunConfig
from syncline.errors import ConfigError, Interrupted, SynclineError, UnknownName, WorkerFailed
from syncline.lab.chaos import runs, soak
from syncline.lab.chaos.interrupts import interrupt_seen
from syncline.lab.chaos.kills import KilledProcess, KillInterval
from syncline.lab.chaos.soak import ChaosSettings
from syncline.lab.chaos.watchdog import Watchdog
from syncline.lab.faults import VARIABLE, Fault
from syncline.observe.observer import Observer
from syncline.result import Result
from syncline.task import Task
from syncline.telemetry.events import Event, Progress, Recovered, RunStarted, Summary, WorkerFailure
from syncline.telemetry.run_dir import EventLog, RunDir


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class World:
    """Simulated runs in which up to `kills_a_run` kills happen, and a record of their configurations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kills_a_run = 2
        self.asked: list[RunConfig] = []
        self.scripts: list[str | None] = []
        self.shares: list[int] = []
        self.outcome: dict[str, Exception | KeyboardInterrupt] = {}
        """The exception that ends a run, by the beginning of its name."""
        self.refuses: dict[str, ConfigError] = {}
        world = self

        class Killer:
            def __init__(self, interval: KillInterval, *, most: int, seed: str, **_: Any) -> None:
                world.shares.append(most)
                self.most, self.kills = most, list[KilledProcess]()

            def on_event(self, event: Event) -> None:
                if isinstance(event, WorkerFailure) and len(self.kills) < self.most:
                    self.kills.append(KilledProcess(event.time - 0.01, event.worker_id, 1000, event.step))

            def close(self) -> None:
                pass

        monkeypatch.setattr(soak, "Killer", Killer)
        monkeypatch.setattr(runs, "run_task", self.run_task)

    def run_task(self, task: object, config: RunConfig, view: Observer, **_: Any) -> Result:
        self.asked.append(config)
        self.scripts.append(os.environ.get(VARIABLE))
        if config.strategy in self.refuses:
            raise self.refuses[config.strategy]
        assert config.name is not None
        run_dir = RunDir.new(Path(config.out), config.name, exact=True)
        plan = {"strategy": config.strategy, "workers": [{}] * config.workers, "servers": 0}
        events: list[Event] = [RunStarted(run_dir=str(run_dir.path), plan=plan, machine={})]
        now = time.time()
        has_faults = "reference" not in config.name
        for number in range(min(self.kills_a_run, self.shares[-1]) if has_faults else 0):
            at = now + number
            lost = WorkerFailure(
                time=at, worker_id=1, name="worker 1", cause="was killed", step=9, workers=1, is_replaced=True
            )
            events += [lost, Recovered(time=at + 0.04, view=2 + number, members=[0], step=10)]
        events.append(Progress(worker_id=0, epoch=1, step=20, samples=1, seconds=1, cursor=0))
        raised = next((e for start, e in self.outcome.items() if config.name[3:].startswith(start)), None)
        metrics = {"test/accuracy": 0.9 + 0.01 * config.seed}
        if raised is None:
            events.append(
                Summary(metrics=metrics, samples_per_s=1, seconds=1, steps=20, epochs=1, workers=2, run_dir="")
            )
        log = EventLog(run_dir)
        for event in events:
            view.on_event(event)
            log.write(event)
        log.close()
        view.close()
        if raised is not None:
            raise raised
        return Result(metrics, run_dir.path, 20, 1.0, 1.0, 1.0, {}, lambda: None)  # type: ignore[arg-type,return-value]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def run(*strategies: str, config: RunConfig | None = None, out: Path | None = None, **settings: Any) -> Any:
    wanted = ChaosSettings(strategies=strategies or ("allreduce",), every=KillInterval(seconds=1), **settings)
    task = Task(model="mlp", data="digits")
    return soak.soak(task, config or RunConfig(workers=2), wanted, command="syncline chaos ...", out=out)


def test_each_strategy_trains_once_without_faults_and_once_with_its_share_of_the_kills(world, capsys):
    card = run("allreduce", "sparknet", kills=4)
    assert [(c.strategy, c.seed, c.name) for c in world.asked] == [
        ("allreduce", 0, "01-allreduce-reference-1"), ("allreduce", 0, "01-allreduce-run-1"),
        ("sparknet", 0, "02-sparknet-reference-1"), ("sparknet", 0, "02-sparknet-run-1"),
    ]  # fmt: skip
    assert world.shares == [2, 2]
    assert card.total().injections == 4
    assert card.total().hangs == 0
    out, err = capsys.readouterr()
    assert "mlp on digits, 2 workers: 4 faults in 2 runs, seed 0" in out
    assert re.search(r"1/4 kill worker 1 at step 9: .* 50 ms", err)
    assert "   4/4 kill worker 1" in err
    assert re.search(r"allreduce, seed 0, no faults: .* 1\.0 s", err)
    assert "\x1b" not in out + err


def test_rounds_continue_with_other_seeds_until_there_were_enough_kills(world):
    world.kills_a_run = 1
    card = run("allreduce", "sparknet", kills=5, references=0)
    assert [(c.strategy, c.seed) for c in world.asked] == [
        ("allreduce", 0), ("sparknet", 0), ("allreduce", 1), ("sparknet", 1), ("allreduce", 2),
    ]  # fmt: skip
    assert card.total().injections == 5
    assert [s.metrics["test/accuracy"] for s in card.scores] == pytest.approx([0.9, 0.9, 0.91, 0.91, 0.92])


def test_failures_do_not_end_a_run_and_no_run_is_resumed(world):
    run(kills=1, config=RunConfig(workers=2, max_failures=3, on_worker_failure="replace-only", resume="auto"))
    assert {(c.max_failures, c.on_worker_failure, c.resume) for c in world.asked} == {(1_000_000, "replace-only", None)}


def test_the_script_is_in_the_environment_of_runs_with_faults_only(world, monkeypatch):
    monkeypatch.setenv(VARIABLE, "before")
    with pytest.raises(SynclineError, match="1 scripted fault"):
        run(kills=0, faults=(Fault("stop", 5, 1),))
    assert world.scripts == ["before", "stop worker 1 at step 5"]
    assert os.environ[VARIABLE] == "before"


def test_a_strategy_that_fails_is_on_the_scorecard_and_the_others_continue_without_it(world, capsys):
    world.outcome = {"allreduce-run": WorkerFailed("Worker 1 is gone.")}
    world.kills_a_run = 1
    with pytest.raises(SynclineError, match="1 of 3 runs failed"):
        run("allreduce", "sparknet", kills=3, out=Path("score.txt"))
    assert [c.strategy for c in world.asked if "run" in (c.name or "")] == ["allreduce", "sparknet", "sparknet"]
    data = json.loads(Path("score.json").read_text())
    assert [r["outcome"] for r in data["runs"]] == ["failed", "finished", "finished"]
    assert data["runs"][0]["reason"] == "Worker 1 is gone."
    assert "allreduce (seed 0) failed: Worker 1 is gone." in capsys.readouterr().out


def test_a_strategy_that_fails_without_faults_is_a_failure_too(world):
    world.outcome = {"allreduce-reference": ZeroDivisionError("no")}
    with pytest.raises(SynclineError, match="1 of 2 runs failed"):
        run("allreduce", "sparknet", kills=2)
    assert [c.strategy for c in world.asked] == ["allreduce", "sparknet", "sparknet"]


@pytest.mark.parametrize("references", [0, 1])
def test_a_strategy_that_does_not_fit_the_run_is_skipped_and_reported(world, capsys, references):
    world.refuses = {"h2o": ConfigError("h2o needs groups of 2.")}
    card = run("allreduce", "h2o", kills=2, references=references)
    assert card.skipped == {"h2o": "h2o needs groups of 2."}
    assert "h2o was skipped: h2o needs groups of 2." in capsys.readouterr().out
    with pytest.raises(SynclineError, match="h2o needs groups of 2"):
        run("h2o", kills=2, references=references)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("Stopped after step 3.")])
def test_ctrl_c_shows_the_score_so_far(world, capsys, stop):
    world.outcome = {"sparknet-run": stop}
    with pytest.raises(Interrupted, match=r"score\.txt"):
        run("allreduce", "sparknet", "gossip", kills=6, out=Path("score.txt"))
    data = json.loads(Path("score.json").read_text())
    assert data["is_interrupted"]
    assert [r["outcome"] for r in data["runs"]] == ["finished", "interrupted"]
    assert "2 faults short" in capsys.readouterr().out


def test_ctrl_c_before_the_first_result_keeps_an_earlier_scorecard(world):
    world.outcome = {"allreduce-reference": KeyboardInterrupt()}
    Path("score.txt").write_text("precious")
    with pytest.raises(Interrupted):
        run(kills=1, out=Path("score.txt"))
    assert Path("score.txt").read_text() == "precious"


def test_runs_that_finish_before_a_kill_are_an_error(world):
    world.kills_a_run = 0
    with pytest.raises(SynclineError, match=r"every 1s.*--epochs"):
        run(kills=3)
    assert len(world.asked) == 2, "it is not retried forever"


def test_the_scorecard_is_written_after_each_run(world, monkeypatch):
    seen: list[int] = []
    whole = world.run_task

    def run_task(*arguments: Any, **more: Any) -> Result:
        file = Path("score.json")
        seen.append(len(json.loads(file.read_text())["runs"]) if file.exists() else -1)
        return whole(*arguments, **more)

    monkeypatch.setattr(runs, "run_task", run_task)
    run("allreduce", "sparknet", "gossip", kills=6, references=0, out=Path("score.txt"))
    assert seen == [-1, 1, 2]


def test_a_signal_is_seen_without_taking_it_from_its_handler():
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with interrupt_seen() as was_stopped:
            assert not was_stopped()
            os.kill(os.getpid(), signal.SIGTERM)
            assert was_stopped()
            assert was_stopped(), "it stays set"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("attempt", "error", "words"),
    [
        (lambda: run("spraknet"), UnknownName, "Did you mean 'sparknet'"),
        (lambda: run(kills=-1), ConfigError, "--kills is -1"),
        (lambda: run(kills=0), ConfigError, "--kills is 0"),
        (lambda: run(references=-1), ConfigError, "--references is -1"),
        (lambda: run(hang_s=0), ConfigError, "must be more than 0"),
        (lambda: run(faults=(Fault("kill", 5, 2),)), ConfigError, "workers 0 to 1"),
        (lambda: run(out=Path(".")), ConfigError, "is a folder"),
        (lambda: run(out=Path("score.json")), ConfigError, "JSON"),
        (lambda: run(out=Path("/proc/no/score.txt")), ConfigError, "/proc/no/score.txt"),
    ],
)
def test_a_mistake_is_reported_before_anything_trains(
    world, attempt: Callable[[], object], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        attempt()
    assert not world.asked
    assert not Path("runs").exists()


# The watchdog


def test_the_watchdog_ends_a_run_without_progress_by_asking_the_zygote_to_end(monkeypatch):
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr("syncline.lab.chaos.watchdog.zygote_of", lambda _: 4242)
    monkeypatch.setattr("syncline.lab.chaos.watchdog.send", lambda pid, number, **_: ended.append((pid, number)))
    watchdog = Watchdog(hang_s=0.3, limit_s=60)
    watchdog._thread.join(10)
    watchdog.close()
    assert ended == [(4242, signal.SIGTERM)], "a zygote that is killed would be replaced"
    assert "0.3 s" in watchdog.reason


def test_the_watchdog_ends_a_run_that_exceeds_the_limit_despite_progress(monkeypatch):
    monkeypatch.setattr("syncline.lab.chaos.watchdog.zygote_of", lambda _: None)
    watchdog = Watchdog(hang_s=0.5, limit_s=1.0)
    while watchdog._thread.is_alive():
        watchdog.on_event(Progress(worker_id=0, epoch=0, step=1, samples=1, seconds=1, cursor=0))
        watchdog._thread.join(0.05)
    watchdog.close()
    assert "1.0 s" in watchdog.reason


def test_the_watchdog_ignores_a_finished_run():
    watchdog = Watchdog(hang_s=0.1, limit_s=60)
    watchdog.on_event(Summary(metrics={}, samples_per_s=1, seconds=1, steps=1, epochs=1, workers=1, run_dir=""))
    watchdog.close()
    assert not watchdog.reason


# The command


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["chaos", "mlp", "--data", "digits", *arguments])


def test_the_command_kills_ten_by_default_and_none_with_a_script(world):
    assert command("--references", "0").exit_code == 0
    assert sum(world.shares[:1]) == 10
    world.shares.clear()
    done = command("--fault", "stop worker 1 at step 50", "--references", "0")
    assert isinstance(done.exception, SynclineError), "the fault never happens in these runs"
    assert world.shares == [0]


def test_json_prints_one_object_per_line_and_the_scorecard_last(world):
    done = command("--kills", "2", "--json", "--seed", "7")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines] == [
        "started", "run_started", "reference", "run_started", "recovery", "recovery", "run_ended", "summary",
    ]  # fmt: skip
    assert lines[-1]["total"]["injections"] == 2
    assert lines[-1]["seed"] == 7
    assert Path(lines[-1]["file"]).is_file()


def test_all_strategies_means_every_preset(world):
    done = command("--all-strategies", "--kills", "16", "--references", "0")
    assert done.exit_code == 0, done.output
    assert len({c.strategy for c in world.asked}) == len(world.asked) == 16
    assert world.shares == [1] * 16
    both = command("--all-strategies", "--strategy", "allreduce")
    assert isinstance(both.exception, ConfigError)
    assert "--all-strategies" in str(both.exception)


def test_ctrl_c_exits_with_130(world):
    world.outcome = {"allreduce-run": Interrupted("Stopped.")}
    done = command("--kills", "2")
    assert done.exit_code == 130
    assert "runs/chaos-" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--every", "often"], "3s, 250ms, 2min or '200 steps'"),
        (["--fault", "explode worker 1"], "kill worker K at step N"),
        (["--hang-after", "60"], "3s, 250ms or 2min"),
    ],
)
def test_an_unreadable_flag_names_the_allowed_form(world, arguments, words):
    done = command(*arguments)
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert not world.asked
