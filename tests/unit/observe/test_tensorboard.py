"""What TensorBoard reads back from a report's files."""

from __future__ import annotations

import subprocess
import sys

import pytest
from report_runs import START, whole_run, write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import syncline
from syncline.cli.main import app
from syncline.errors import ConfigError
from syncline.observe.report.record import record_of
from syncline.observe.report.tensorboard import write_scalars


def read(folder) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def test_the_curves_and_each_workers_rate_are_there_at_their_steps_and_times(tmp_path):
    write_scalars(record_of("a", whole_run()), tmp_path)
    run, worker = read(tmp_path / "run"), read(tmp_path / "worker-1")
    losses = run.Scalars("train/loss")
    assert [s.step for s in losses] == list(range(1, 31))
    assert losses[3].value == pytest.approx(2.0 / 4)
    assert losses[3].wall_time == pytest.approx(START + 4)
    assert [s.step for s in run.Scalars("test/accuracy")] == [10, 20, 30]
    assert {s.value for s in worker.Scalars("throughput/samples_per_s")} == {200.0}


def test_writing_again_replaces_what_was_there(tmp_path):
    for _ in range(2):
        write_scalars(record_of("a", whole_run()), tmp_path)
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert len(read(tmp_path / "run").Scalars("train/loss")) == 30


def test_scalars_need_no_torch(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    code = (
        "import sys\nfrom syncline.cli.main import app\n"
        f"try:\n    app(['report', {str(run)!r}])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run / "tensorboard" / "run").is_dir()


def test_on_request_there_are_histograms_of_the_parameters_and_the_graph(tmp_path):
    result = syncline.train(
        model="mlp", data="digits", workers=1, epochs=1, max_steps=2, out=str(tmp_path), quiet=True, tune="off"
    )
    done = CliRunner().invoke(app, ["report", str(result.run_dir), "--histograms", "--graph"])
    assert done.exit_code == 0, done.output
    folder = result.run_dir / "tensorboard"
    parameters = read(folder / "parameters")
    names = {name for name, _ in result.model.named_parameters()}
    assert names <= set(parameters.Tags()["histograms"])
    assert [h.step for h in parameters.Histograms(min(names))] == [2]
    assert read(folder / "graph").Tags()["graph"]


def test_what_is_only_for_tensorboard_is_not_asked_for_without_it(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    done = CliRunner().invoke(app, ["report", str(run), "--no-tensorboard", "--graph"])
    assert isinstance(done.exception, ConfigError)
    assert not (run / "tensorboard").exists()


def test_a_run_without_checkpoints_has_no_histograms_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    done = CliRunner().invoke(app, ["report", str(run), "--histograms"])
    assert isinstance(done.exception, ConfigError)
    assert "no checkpoint" in str(done.exception)
