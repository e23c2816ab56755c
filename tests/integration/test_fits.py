"""Fits on several workers: the same result whatever fails, and nothing lost when they are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

import syncline
from syncline.cli.main import app
from syncline.lab.faults import install
from syncline.telemetry.events import Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.slow
SCHEDULE = syncline.Blocks(lanes=2, size=20)


def problem(rows=200, columns=1000):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, columns))
    used = min(columns, 10)
    return x, x[:, :used] @ np.arange(1.0, used + 1) + random.normal(size=rows)


def fit(tmp_path, **options):
    return syncline.fit(
        "lasso(alpha=0.05)", data=problem(), tolerance=1e-9, out=tmp_path, quiet=True,
        **{"schedule": SCHEDULE, **options},
    )  # fmt: skip


def test_two_workers_find_what_one_finds_also_when_both_are_killed(tmp_path, monkeypatch):
    alone = fit(tmp_path)
    assert alone.converged
    for name, value in install("kill worker 1 at step 40; kill worker 0 at step 90").items():
        monkeypatch.setenv(name, value)
    found = fit(tmp_path, workers=2)
    assert found["coefficients"].tobytes() == alone["coefficients"].tobytes()
    assert found.rounds == alone.rounds
    events = list(RunDir(found.run_dir).read_events())
    assert len([event for event in events if isinstance(event, WorkerFailure)]) == 2
    assert any(isinstance(event, Recovered) for event in events)


def test_factors_are_the_same_when_a_worker_is_killed(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    pairs = random.choice(80 * 60, 1500, replace=False)
    data = pairs // 60, pairs % 60, random.integers(1, 6, len(pairs))

    def factors(workers):
        options = {"out": tmp_path, "quiet": True, "tolerance": 0.0, "max_rounds": 60}
        found = syncline.fit("als(factors=8)", data=data, workers=workers, **options)
        assert found.rounds == 60
        return found["item_factors"].tobytes()

    alone = factors(1)
    for name, value in install("kill worker 1 at step 30").items():
        monkeypatch.setenv(name, value)
    assert factors(2) == alone


def test_a_fit_that_ends_without_its_workers_resumes_to_the_same_result(tmp_path, monkeypatch):
    whole = fit(tmp_path)
    for name, value in install("kill worker 0 at step 60").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(syncline.WorkerFailed) as failed:
        fit(tmp_path, workers=2, on_worker_failure="stop", checkpoint_every_steps=25)
    monkeypatch.undo()
    run_dir = failed.value.facts["run_dir"]
    syncline.resume(run_dir, quiet=True)
    with np.load(f"{run_dir}/result.npz") as found:
        assert found["coefficients"].tobytes() == whole["coefficients"].tobytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_the_work_of_the_last_round(tmp_path, workers):
    x, y = problem()
    np.savetxt(tmp_path / "table.csv", np.column_stack([x, y]), delimiter=",", comments="",
               header=",".join([*(f"c{i}" for i in range(x.shape[1])), "y"]))  # fmt: skip
    # So many rounds that the signal comes before the end.
    command = [
        sys.executable, "-m", "syncline", "fit", "lasso(alpha=0.001)", "--data", "table.csv", "--target", "y",
        "--lanes", "2", "--size", "1", "--by", "random", "--tolerance", "1e-13", "--workers", str(workers),
        "--max-rounds", "200000", "--name", "run",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = tmp_path / "runs" / "run"
    deadline = time.monotonic() + 60
    while not (run_dir.exists() and any(e.step > 50 for e in RunDir(run_dir).read_events() if hasattr(e, "step"))):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "syncline resume" in errors
    assert any((run_dir / "checkpoints").glob("step-*.pt"))
    step = max(int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("step-*.pt"))
    assert 0 < step < 200_000
    assert not (run_dir / "result.npz").exists()


def test_the_command_prints_and_saves_what_it_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = problem(50, 5)
    np.savetxt("t.csv", np.column_stack([x, y]), delimiter=",", comments="", header="a,b,c,d,e,target")
    done = CliRunner().invoke(
        app, ["fit", "lasso(alpha=0.1)", "--data", "t.csv", "--target", "target", "--save", "w.npz"]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "coefficients are not zero" in done.stdout
    with np.load("w.npz") as found:
        assert found["coefficients"].shape == (5,)
    for arguments, says in (
        (["--target", "y"], "no column 'y'"), (["--target", "target", "--by", "luck"], "by is 'luck'"),
        ([], "--target"), (["--target", "target", "--start", "w.txt"], "w.txt"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["fit", "lasso", "--data", "t.csv", *arguments])
        assert done.exit_code == 1
        assert says in done.output + str(done.exception or "")
