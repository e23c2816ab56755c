"""Whatever happens to the files of a run: a clear error or the right result, in limited time, and nothing left behind.

Each example damages one file of a finished run and gives the directory to the functions behind `resume`, `audit`,
`report`, `strategies --run`, `watch` and `predict`. `resume` stops where the workers would start.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from fuzzing import (
    StandInEngine,
    Started,
    damaged_bytes,
    damaged_json,
    damaged_lines,
    examples,
    limited,
    seconds_for_all,
    trained_run,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from syncline import driver
from syncline.boundary import as_expected
from syncline.cli.audit import audit
from syncline.errors import SynclineError
from syncline.observe.live.follow import Follower
from syncline.observe.live.live_page import live_page, update
from syncline.observe.observer import JsonLines
from syncline.observe.report.load import load
from syncline.observe.report.report_page import as_html
from syncline.observe.report.tensorboard import write_scalars
from syncline.observe.strategy_stats import strategy_stats
from syncline.observe.terminal import strategy_report
from syncline.prediction import predict
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("fuzzed_run_dirs")  # one process, because these tests share a run

DECISIVE = ("kind", "model", "data", "seed", "batch", "train_samples", "held_out", "strategy", "batch_norm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    run = trained_run(folder)
    Image.new("L", (8, 8), 200).save(folder / "image.png")
    return run


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "engine_for", lambda _: StandInEngine())


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@st.composite
def damage(draw: st.DrawFn, whole: Path) -> tuple[str, bytes | None]:
    """The name of a file and its new content; None if it is gone."""
    names = files_of(whole)
    name = draw(st.sampled_from(names))
    data = (whole / name).read_bytes()
    kinds = ["bytes", "truncated", "swapped", "gone", "empty"]
    if name.endswith((".json", ".jsonl")):
        kinds += ["keys"] * 6
    match draw(st.sampled_from(kinds)):
        case "keys":
            return name, draw(damaged_lines(data) if name.endswith(".jsonl") else damaged_json(data))
        case "bytes":
            return name, draw(damaged_bytes(data))
        case "truncated":
            return name, data[: draw(st.integers(0, len(data)))]
        case "swapped":
            return name, (whole / draw(st.sampled_from(names))).read_bytes()
        case "empty":
            return name, b""
    return name, None


def resumed(run: Path) -> Any:
    """The run starts from one of its own checkpoints, with its own plan; or it is refused."""
    try:
        driver.resume(run, JsonLines(io.StringIO()), epochs=3)
    except Started as started:
        checkpoint = Path(started.facts["files"].checkpoint_path)
        plan = json.loads((run / "plan.json").read_text())
        return checkpoint.read_bytes(), {name: plan[name] for name in DECISIVE}
    raise AssertionError("it neither started nor failed")


def audited(run: Path) -> None:
    with contextlib.suppress(typer.Exit):  # samples are lost or repeated, and it has said so
        audit(run)


def reported(run: Path) -> None:
    (record,) = load([run], lambda _: False)
    assert "</html>" in as_html([record])
    write_scalars(record, run / "tensorboard")


def told(run: Path) -> None:
    stats = strategy_stats(RunDir.existing(run).read_events())
    strategy_report.as_json(stats)
    strategy_report.show(stats, io.StringIO())


def watched(run: Path) -> None:
    follower = Follower(RunDir.existing(run), lambda _: False)
    follower.refresh()
    live_page(follower.record)
    json.dumps(update(follower.record))


def predicted(run: Path) -> Any:
    """The prediction and whether an older checkpoint was used, which is told."""
    with warnings.catch_warnings(record=True) as told_of:
        warnings.simplefilter("always")
        (found,) = predict(run, run.parent.parent / "image.png")
    return found.probabilities if not told_of else None


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "resume": resumed, "audit": audited, "report": reported, "strategies": told, "watch": watched,
    "predict": predicted,
}  # fmt: skip


def outcome(command: Callable[[Path], Any], run: Path) -> Any:
    """What a command gives; a `SynclineError` is an answer as well."""
    try:
        with limited(f"{command.__name__}({run})"):
            return command(run)
    except Exception as error:
        expected = as_expected(error)  # as at the boundary of the command
        if expected is None:
            raise
        assert str(expected).strip()
        return expected


@pytest.fixture
def undamaged(whole: Path, no_workers: None) -> tuple[set[bytes], Any, Any]:
    """The checkpoints of the run, its plan and its prediction, to compare with."""
    checkpoints = {path.read_bytes() for path in (whole / "checkpoints").glob("*.pt")}
    plan = json.loads((whole / "plan.json").read_text())
    return checkpoints, {name: plan[name] for name in DECISIVE}, predicted(whole)


def test_every_command_accepts_the_run_as_it_was_left(whole, undamaged, capsys):
    for command, act in COMMANDS.items():
        run = whole.with_name("damaged")
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        found = outcome(act, run)
        assert not isinstance(found, SynclineError), f"{command}: {found}"
    assert "0 lost, 0 repeated" in capsys.readouterr().out


@pytest.mark.timeout(seconds_for_all())
@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_a_damaged_run_directory_gives_a_clear_error_or_the_right_result(whole, undamaged, capsys, data):
    name, content = data.draw(damage(whole))
    checkpoints, plan, prediction = undamaged
    for command, act in COMMANDS.items():
        run = whole.with_name("damaged")
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        if content is None:
            (run / name).unlink()
        else:
            (run / name).write_bytes(content)
        found = outcome(act, run)
        if isinstance(found, SynclineError):
            continue
        if command == "resume":
            assert found[0] in checkpoints, "only what was saved is resumed"
            assert found[1] == plan, "with the plan that it had"
        if command == "predict" and not (name.startswith("checkpoints/") and content is None):
            assert found in (prediction, None), "an older checkpoint is not used in silence, unless a newer one is gone"
        left = [path for path in run.rglob(".*") if path.is_file()]
        assert not left, f"{command} left {left}"
    capsys.readouterr()
