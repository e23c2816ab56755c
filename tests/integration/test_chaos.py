"""`syncline chaos` with real runs: a short soak test, scripted faults, Ctrl-C, and the commands of docs/failures.md."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_loop_scripts import PLAIN
from real_runs import ROOT, environment
from real_runs import syncline as command
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError
from syncline.telemetry.events import Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir

PAGE = (ROOT / "docs" / "failures.md").read_text()


def chaos(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The scorecard of a soak test on a small task that found no problem."""
    done = command(
        "chaos", "mlp", "--data", "digits", "--workers", "2", "--hang-after", "30s", "--json", *arguments,
        cwd=tmp_path, timeout_s=170, is_warm=False,
    )  # fmt: skip
    assert done.code == 0, done.out[-3000:] + done.err
    score: dict[str, Any] = done.events[-1]
    return score


def test_six_kills_over_three_strategies_cost_no_run_no_sample_and_no_hang(tmp_path):
    score = chaos(
        tmp_path, "--epochs", "60", "--kills", "6", "--every", "80 steps", "--seed", "7", "--references", "0",
        "--strategy", "allreduce", "--strategy", "server-sync", "--strategy", "sparknet",
    )  # fmt: skip
    total = score["total"]
    assert total["injections"] == 6
    assert total["hangs"] == 0
    assert total["finished"] == total["runs"] >= 3
    assert total["lost"] == total["repeated"] == 0, "by the ledger"
    assert all(run["metrics"]["test/accuracy"] > 0.9 for run in score["runs"])
    for run in score["runs"]:
        events = list(RunDir(tmp_path / run["run_dir"]).read_events())
        killed = [e.worker_id for e in events if isinstance(e, WorkerFailure)]
        hit = [r["injection"]["worker_id"] for r in run["recoveries"] if r["result"] != "too late"]
        late = [r["injection"]["worker_id"] for r in run["recoveries"] if r["result"] == "too late"]
        # One that was too late may have been noticed as well.
        assert killed in (hit, hit + late), "the processes were really killed"
        assert any(isinstance(e, Recovered) for e in events) or not hit
        assert all(r["recovered_s"] < 30 for r in run["recoveries"] if r["result"] == "recovered")


def test_kills_of_stages_and_shards_cost_no_run_no_sample_and_no_hang(tmp_path):
    score = chaos(
        tmp_path, "--workers", "4", "--layout", "pipeline(2) x sharded(2)", "--epochs", "25", "--kills", "4",
        "--every", "60 steps", "--references", "0",
    )  # fmt: skip
    total = score["total"]
    assert (total["injections"], total["hangs"], total["lost"], total["repeated"]) == (4, 0, 0, 0)
    assert total["finished"] == total["runs"]
    assert all(run["metrics"]["test/accuracy"] > 0.9 for run in score["runs"])


def test_scripted_faults_happen_once_each_and_the_metric_is_that_of_the_reference_run(tmp_path):
    score = chaos(
        tmp_path, "--epochs", "40", "--checkpoint-every-steps", "30",  # not over when the disk has room again
        "--fault", "kill worker 1 at step 40", "--fault", "raise in worker 0 at step 120",
        "--fault", "slow worker 1 at step 200 by 3x for 0.5s", "--fault", "fill the disk at step 250 for 0.3s",
    )  # fmt: skip
    (run,) = score["runs"]
    assert [(r["injection"]["what"].split()[0], r["result"]) for r in run["recoveries"]] == [
        ("kill", "recovered"), ("raise", "recovered"), ("slow", "tolerated"), ("fill", "tolerated"),
    ]  # fmt: skip
    assert run["recoveries"][0]["injection"]["step"] == 40
    (reference,) = score["references"]
    assert run["metrics"]["test/accuracy"] == pytest.approx(reference["metrics"]["test/accuracy"], abs=0.02)


def test_a_stopped_worker_is_detected_within_three_seconds(tmp_path):
    score = chaos(tmp_path, "--epochs", "20", "--references", "0", "--fault", "stop worker 1 at step 60")
    (recovery,) = score["runs"][0]["recoveries"]
    assert recovery["result"] == "recovered"
    assert recovery["detected_s"] < 3


def test_a_server_can_be_killed_at_a_step(tmp_path):
    score = chaos(
        tmp_path, "--epochs", "15", "--references", "0", "--strategy", "server-async",
        "--fault", "kill server 0 at step 60",
    )  # fmt: skip
    (recovery,) = score["runs"][0]["recoveries"]
    assert (recovery["result"], recovery["injection"]["worker_id"]) == ("recovered", 2)


def test_kills_in_a_loop_of_ones_own_cost_no_sample_and_the_metric_is_what_it_logs(tmp_path):
    loop = PLAIN.replace("range(2)", "worker.epochs(epochs)").replace("import os,", "import sys, os,")
    (tmp_path / "loop.py").write_text(
        loop.replace("worker = syncline.worker()", "worker = syncline.worker()\nepochs = int(sys.argv[1])")
        + "worker.log(score=F.cross_entropy(model(inputs), targets).item())\n"
    )
    done = command(
        "chaos", "loop.py", "--own-loop", "--workers", "2", "--kills", "2", "--every", "100 steps", "--json", "--",
        "600", cwd=tmp_path, timeout_s=170, is_warm=False,
    )  # fmt: skip
    assert done.code == 0, done.out[-3000:] + done.err
    score = done.events[-1]
    assert score["title"] == "loop.py, 2 workers"
    total, runs, (reference,) = score["total"], score["runs"], score["references"]
    assert (total["injections"], total["hangs"], total["lost"], total["repeated"]) == (2, 0, 0, 0)
    assert [recovery["result"] for run in runs for recovery in run["recoveries"]] == ["recovered", "recovered"]
    assert all(run["metrics"]["score"] == pytest.approx(reference["metrics"]["score"], abs=0.05) for run in runs)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("mlp", "--data", "digits", "--", "--depth", "3"), "--own-loop"),
        (("loop.py", "--own-loop", "--epochs", "3"), "--epochs"),
        (("loop.py", "--own-loop", "--data", "digits"), "--data"),
        (("loop.py", "--own-loop", "--namespaces", "2"), "--namespaces"),
    ],
)
def test_what_a_script_decides_on_and_arguments_of_a_task_are_refused(tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(PLAIN)
    done = CliRunner().invoke(app, ["chaos", *words])
    assert isinstance(done.exception, ConfigError)
    assert expected in str(done.exception)
    assert list(tmp_path.iterdir()) == [tmp_path / "loop.py"]


def test_ctrl_c_stops_the_run_cleanly_and_shows_the_score_so_far(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", "chaos", "mlp", "--data", "digits", "--epochs", "500",
         "--kills", "50", "--every", "300ms", "--references", "0"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while "2/50 kill " not in (line := process.stderr.readline()):
            assert line, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, out + err
    assert "faults short" in out
    assert "0 hangs" in out
    assert "runs/chaos-" in err


# The page


def commands_of_the_page() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("syncline ") and "RUN" not in line})


@pytest.mark.parametrize("line", commands_of_the_page())
def test_every_command_of_the_page_on_failures_is_accepted(line, tmp_path, monkeypatch):
    words = shlex.split(line)[1:]
    if words[0] != "chaos":
        done = command(*words, "--max-steps", "3", "--evaluate-every", "0", cwd=tmp_path)
        assert done.code == 0, done.err
        return
    asked: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("syncline.lab.chaos.soak.soak", lambda *arguments, **_: asked.append(arguments))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert len(asked) == 1


def test_the_page_names_every_strategy_and_every_fault():
    from syncline.lab.faults import read_fault
    from syncline.strategies.presets import PRESETS

    assert not [p.name for p in PRESETS.values() if f"`{p.name}`" not in PAGE]
    faults = [read_fault(text) for text in re.findall(r"^\| `([a-z]+ [^`]* at step [^`]*)` \|", PAGE, re.M)]
    assert {fault.kind for fault in faults} == {"kill", "stop", "slow", "raise", "cut", "disconnect", "lose", "fill"}
