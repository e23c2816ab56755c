"""`syncline strategies --compare`: small real runs, and simulated ones for rare failures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_runs import syncline as command
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.config.run import RunConfig
from syncline.errors import ConfigError, Interrupted, SynclineError, UnknownName, WorkerFailed
from syncline.lab.bench import compare_strategies
from syncline.lab.bench.compare_strategies import (
    Comparison,
    ComparisonRow,
    ComparisonSettings,
    as_lines,
    as_markdown,
    compare,
    presets_named,
)
from syncline.observe.observer import Observer
from syncline.result import Result
from syncline.strategies.presets import PRESETS, Preset
from syncline.telemetry.events import Evaluated, Event, ExchangeStats, Progress, RunStarted, WarningMessage
from syncline.telemetry.run_dir import EventLog, RunDir

TINY = ComparisonSettings(model="linear", data="digits", workers=2, epochs=1)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def presets(*names: str) -> dict[str, Preset]:
    return {name: Preset(name, "no one", "none", PRESETS["allreduce"].make) for name in names}


def scripted(
    monkeypatch: pytest.MonkeyPatch, *names: str, outcome: dict[str, BaseException] | None = None
) -> list[RunConfig]:
    """Presets called `names` with simulated runs, which raise what is in `outcome`; returns their configurations."""
    asked: list[RunConfig] = []

    def run_task(task: object, config: RunConfig, view: Observer, **_: Any) -> Result:
        asked.append(config)
        run_dir = RunDir.new(Path(config.out), config.name or "", exact=True)
        log = EventLog(run_dir)
        plan = {"strategy": config.strategy, "workers": [{}] * config.workers}
        events: list[Event] = [RunStarted(run_dir=str(run_dir.path), plan=plan, machine={})]
        for epoch, accuracy in enumerate((0.97, 0.986, 0.984), 1):
            for rank in range(config.workers):
                events.append(Progress(worker_id=rank, epoch=epoch, step=epoch, samples=50, seconds=1, cursor=0))
                events.append(
                    ExchangeStats(worker_id=rank, step=epoch, steps=1, exchanges=1, bytes_sent=100, bytes_received=20)
                )
            events.append(Evaluated(epoch=epoch, step=epoch, metrics={"test/accuracy": accuracy}, seconds=1))
        events.append(WarningMessage(message="Mind the step."))
        for event in events:
            view.on_event(event)
            log.write(event)
        log.close()
        view.close()
        if outcome and config.strategy in outcome:
            raise outcome[config.strategy]
        return Result({"test/accuracy": 0.984}, run_dir.path, 3, 3.0, 12.3, 4567.0, {}, lambda: None)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(compare_strategies, "PRESETS", presets(*names))
    monkeypatch.setattr(compare_strategies, "run_task", run_task)
    return asked


def test_two_presets_are_trained_and_make_a_table(tmp_path: Path) -> None:
    done = command(
        "strategies", "--compare", "--model", "linear", "--data", "digits", "--workers", "2", "--epochs", "1",
        "--only", "allreduce", "--only", "iterative_reduce", "--out", "docs/table.md", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads((tmp_path / "docs" / "table.json").read_text())
    assert [row["name"] for row in data["rows"]] == ["allreduce", "iterative-reduce"]
    for row in data["rows"]:
        assert row["failure"] is None
        assert 0.3 < row["accuracy"] < 1
        assert row["samples_per_s"] > 0
        assert row["seconds"] > 0
        assert row["workers"] == 2
        assert (tmp_path / row["run_dir"] / "summary.json").is_file(), "the runs are kept, for strategies --run"
    page = (tmp_path / "docs" / "table.md").read_text()
    assert "| allreduce | 2 | " in page
    assert "| iterative-reduce | 2 | " in page
    assert "torch 2." in page, "the machine is described"
    assert "--only iterative_reduce --out docs/table.md" in page, "the command that reproduces it"
    assert "1/2 allreduce: training" in done.err
    assert "; 1 left, about " in done.err
    assert "\x1b" not in done.out + done.err


def test_a_preset_that_fails_is_a_row_and_the_others_continue(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Only the comparison knows this one, so that the run itself rejects it.
        patch.setattr(compare_strategies, "PRESETS", {**presets("unheard"), "allreduce": PRESETS["allreduce"]})
        with pytest.raises(SynclineError, match=r"unheard.*table\.md"):
            compare(TINY, out=Path("table.md"))
    failed, fine = json.loads(Path("table.json").read_text())["rows"]
    assert "There is no strategy 'unheard'" in failed["failure"]
    assert failed["meets_goal"] is None
    assert fine["name"] == "allreduce"
    assert fine["accuracy"] > 0.3
    out, err = capsys.readouterr()
    assert "1/2 unheard: failed: There is no strategy 'unheard'." in err
    assert "unheard failed: There is no strategy 'unheard'." in out


def test_a_row_has_accuracy_goal_epoch_bytes_speed_and_time(monkeypatch, capsys) -> None:
    scripted(monkeypatch, "one")
    found = compare(TINY)
    (row,) = found.rows
    assert (row.accuracy, row.goal_epoch, row.meets_goal) == (0.984, 2, True), "reached, although not held"
    assert row.bytes_per_sample == 6 * 120 / (6 * 50)
    assert (row.samples_per_s, row.seconds) == (4567.0, 12.3)
    out, err = capsys.readouterr()
    assert out.splitlines()[3].split() == ["one", "2", "98.40%", "epoch", "2", "2.4", "4,567", "12", "s", "yes"]
    assert "1/1 one: 98.40% (98.5% at epoch 2), 2.4 bytes/sample, 4,567 samples/s, 12 s\n" in err
    assert "1/1 one: warning: Mind the step." in err


def test_hogwild_and_presets_with_a_limit_get_fewer_workers(monkeypatch) -> None:
    asked = scripted(monkeypatch, "allreduce", "hogwild", "mine")
    mine = compare_strategies.PRESETS["mine"]
    object.__setattr__(mine, "workers", 3)
    found = compare(ComparisonSettings(model="linear", data="digits"))
    assert [config.workers for config in asked] == [row.workers for row in found.rows] == [4, 2, 3]
    assert "- **hogwild** ran with 2 workers." in as_markdown(found)


def test_every_preset_runs_with_its_name_and_the_same_settings(monkeypatch) -> None:
    asked = scripted(monkeypatch, "one", "two")
    compare(ComparisonSettings(model="linear", data="digits", workers=3, epochs=2, seed=7))
    assert [(c.strategy, c.workers, c.epochs, c.seed) for c in asked] == [("one", 3, 2, 7), ("two", 3, 2, 7)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("Stopped after step 3.")])
def test_ctrl_c_keeps_the_results_so_far(monkeypatch, capsys, stop: BaseException) -> None:
    scripted(monkeypatch, "one", "two", "three", outcome={"two": stop})
    with pytest.raises(Interrupted, match=r"table\.md"):
        compare(TINY, out=Path("table.md"))
    data = json.loads(Path("table.json").read_text())
    assert data["is_interrupted"]
    assert [row["name"] for row in data["rows"]] == ["one"]
    missing = "not measured: two, three."
    assert missing in capsys.readouterr().out
    assert missing in Path("table.md").read_text()


def test_ctrl_c_before_the_first_result_keeps_an_earlier_table(monkeypatch, capsys) -> None:
    scripted(monkeypatch, "one", outcome={"one": KeyboardInterrupt()})
    Path("table.md").write_text("precious")
    done = CliRunner().invoke(
        app, ["strategies", "--compare", "--model", "linear", "-d", "digits", "--out", "table.md"]
    )
    assert done.exit_code == 130
    assert Path("table.md").read_text() == "precious"


def test_the_table_is_written_after_each_preset(monkeypatch) -> None:
    seen: list[str] = []
    scripted(monkeypatch, "one", "two")
    whole = compare_strategies.run_task

    def run_task(*arguments: Any, **more: Any) -> Result:
        seen.append(Path("table.md").read_text() if Path("table.md").exists() else "")
        return whole(*arguments, **more)

    monkeypatch.setattr(compare_strategies, "run_task", run_task)
    compare(TINY, out=Path("table.md"))
    assert seen[0] == ""
    assert "| one | 2 |" in seen[1]
    assert "not measured: two." in seen[1]
    assert "not measured" not in Path("table.md").read_text()


def test_one_preset_can_be_remeasured_without_the_others(monkeypatch) -> None:
    scripted(monkeypatch, "first", "second", "third")
    page = Path("docs") / "table.md"
    compare(TINY, out=page)
    before = json.loads(page.with_suffix(".json").read_text())
    compare(TINY, only=["second"], out=page)
    after = json.loads(page.with_suffix(".json").read_text())
    assert [row["name"] for row in after["rows"]] == ["first", "second", "third"]
    assert [row == earlier for row, earlier in zip(after["rows"], before["rows"], strict=True)] == [True, False, True]
    assert "--only" not in after["command"], "it reproduces the whole page"
    assert "Some rows are from earlier" in page.read_text()
    compare(ComparisonSettings(model="linear", data="digits", workers=2, epochs=2), only=["second"], out=page)
    rows = json.loads(page.with_suffix(".json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["second"], "rows with other settings do not belong in the same table"


def test_a_traceback_is_summarized_by_its_last_line_and_kept_in_full(monkeypatch, capsys) -> None:
    cause = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nZeroDivisionError: no\n\nWorker 1 raised.'
    scripted(monkeypatch, "one", outcome={"one": WorkerFailed(cause)})
    with pytest.raises(SynclineError):
        compare(TINY, out=Path("table.md"))
    assert "1/1 one: failed: ZeroDivisionError: no" in capsys.readouterr().err
    assert f"**one**: ZeroDivisionError: no\n\n```\n{cause}\n```" in Path("table.md").read_text()


def test_json_prints_one_object_per_line_and_the_table_last(monkeypatch) -> None:
    scripted(monkeypatch, "one", "two")
    done = CliRunner().invoke(app, ["strategies", "--compare", "--model", "linear", "--data", "digits", "--json"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert [line["event"] for line in lines] == [
        "started", "training", "warning", "measured", "training", "warning", "measured", "summary",
    ]  # fmt: skip
    assert lines[3]["left"] == 1
    assert [row["name"] for row in lines[-1]["rows"]] == ["one", "two"]
    assert Path(lines[-1]["file"]).is_file()


def test_a_full_table_fits_80_columns() -> None:
    rows = [
        ComparisonRow(name=name, strategy="s", workers=4, accuracy=0.98765, goal_epoch=3, bytes_per_sample=7898.4,
            samples_per_s=12_345.6, seconds=184.7)
        for name in ("allreduce", "iterative-reduce")
    ]  # fmt: skip
    rows.append(ComparisonRow(name="hogwild", strategy="s", workers=2, failure="It fell over."))
    machine = compare_strategies.BenchMachine.here()
    found = Comparison(ComparisonSettings(), machine, tuple(r.name for r in rows), "syncline", time.time(), rows)
    table = list(as_lines(found))[2:6]
    assert table[2].split() == ["iterative-reduce", "4", "98.77%", "epoch", "3", "7,898", "12,346", "185", "s", "yes"]
    assert table[3].split() == ["hogwild", "2", "failed", "-", "-", "-", "-", "no"]
    assert all(len(line) <= 80 for line in table)


def test_presets_are_chosen_by_name_in_either_spelling_and_default_to_all() -> None:
    assert presets_named([]) == list(PRESETS.values())
    names = [p.name for p in presets_named(["sparknet", "iterative-reduce", "iterative_reduce"])]
    assert names == ["sparknet", "iterative-reduce"]


@pytest.mark.parametrize(
    ("attempt", "error", "words"),
    [
        (lambda: compare(TINY, only=["spraknet"]), UnknownName, "'spraknet'.*'spark"),
        (lambda: compare(ComparisonSettings(model="lenett")), UnknownName, "Did you mean 'lenet'"),
        (lambda: compare(ComparisonSettings(workers=0)), ConfigError, "workers is 0"),
        (lambda: compare(TINY, out=Path(".")), ConfigError, "is a folder"),
        (lambda: compare(TINY, out=Path("table.json")), ConfigError, "JSON"),
        (lambda: compare(TINY, out=Path("/proc/no/table.md")), ConfigError, "/proc/no/table.md"),
    ],
)
def test_a_mistake_is_reported_before_anything_trains(
    monkeypatch, attempt: Callable[[], object], error: type[Exception], words: str
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(compare_strategies, "run_task", lambda *_: asked.append(1))
    with pytest.raises(error, match=words):
        attempt()
    assert not asked
    assert not Path("runs").exists()
