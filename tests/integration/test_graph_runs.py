"""Vertex programs on workers of a run: killed, stopped and resumed, with the result of one process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from real_runs import driver_pid, my_rank
from typer.testing import CliRunner

import syncline
from syncline.cli.main import app
from syncline.errors import ConfigError, DataError, Interrupted
from syncline.telemetry.events import Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir


def graph_of(seed: int = 0) -> syncline.Graph:
    rng = np.random.default_rng(seed)
    return syncline.Graph(np.unique(rng.integers(0, 300, (2, 1500)), axis=1), size=300)


def ranks(flag: Path | None = None, *, kills: dict[int, int] | None = None, interrupt: int | None = None):
    """PageRank, in which ranks are killed, or the driver interrupted, at the start of some rounds, once."""

    def update(v):
        if flag is not None and v.round > 3:
            time.sleep(0.01)  # rounds of a real size, so that copies are made between them
        for place, (number, rank) in enumerate((kills or {}).items()):
            if v.round == number and my_rank() == rank and _first(f"{flag}-{place}"):
                os.kill(os.getpid(), signal.SIGKILL)
        if interrupt is not None and v.round == interrupt and my_rank() == 0 and _first(f"{flag}-stop"):
            os.kill(driver_pid(), signal.SIGINT)
        return 0.15 / v.graph.size + 0.85 * v.gather("in", lambda e: e.source.value / e.source.out_degree)

    return syncline.vertex_program(consistency="vertex", until=1e-13, initial=1.0, name="ranks")(update)


def _first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize(
    ("schedule", "policy"), [("sweep", "shrink-and-replace"), ("priority", "replace-only"), ("fifo", "shrink")]
)
def test_killed_workers_change_no_bit_of_the_result(tmp_path, schedule, policy):
    graph = graph_of()
    expected = syncline.graph.run(ranks(), graph, schedule=schedule)
    found = syncline.graph.run(
        ranks(tmp_path / "flag", kills={6: 1, 20: 0}), graph, schedule=schedule, workers=2 if policy != "shrink" else 3,
        partition="hash", out=str(tmp_path / "runs"), on_worker_failure=policy,
    )  # fmt: skip
    assert found.values.tolist() == expected.values.tolist()
    assert (found.rounds, found.updates, found.converged) == (expected.rounds, expected.updates, True)
    events = [*RunDir(found.facts["run_dir"]).read_events()]
    assert sum(isinstance(event, WorkerFailure) for event in events) == 2
    assert sum(isinstance(event, Recovered) for event in events) >= 2


def test_asynchronous_workers_survive_too_and_keep_edges_consistent(tmp_path):
    graph = graph_of().undirected()
    flag = tmp_path / "flag"

    def update(v):
        time.sleep(0.01)
        if v.round == 4 and my_rank() == 1 and _first(str(flag)):
            os.kill(os.getpid(), signal.SIGKILL)
        return v.gather("in", lambda e: e.source.value, reduce="mex")

    program = syncline.vertex_program(consistency="edge", until=0, initial=-1, schedule="sweep")(update)
    found = syncline.graph.run(
        program, graph, workers=2, partition="hash", asynchronous=True, max_rounds=40, out=str(tmp_path / "runs")
    )
    assert flag.exists()
    assert found.converged
    assert (found.values[graph.sources] != found.values[graph.targets]).all()


def test_asynchronous_workers_that_are_killed_find_the_same_fixed_point(tmp_path):
    graph = graph_of()
    found = syncline.graph.run(
        ranks(tmp_path / "flag", kills={30: 1}), graph, schedule="fifo", workers=2, partition="hash", asynchronous=True,
        out=str(tmp_path / "runs"), on_worker_failure="replace-only",
    )  # fmt: skip
    assert np.abs(found.values - syncline.graph.run(ranks(), graph).values).sum() < 1e-9
    events = [*RunDir(found.facts["run_dir"]).read_events()]
    assert [event.members for event in events if isinstance(event, Recovered)] == [[0, 1]]


def test_ctrl_c_keeps_the_work_and_the_run_is_resumed_from_it(tmp_path):
    graph, out = graph_of(), str(tmp_path / "runs")
    expected = syncline.graph.run(ranks(), graph, schedule="priority")
    stopped = ranks(tmp_path / "flag", interrupt=12)
    with pytest.raises(Interrupted) as caught:
        syncline.graph.run(stopped, graph, schedule="priority", workers=2, out=out)
    run_dir = caught.value.facts["run_dir"]
    assert caught.value.facts["step"] >= 12
    with pytest.raises(ConfigError) as refused:
        syncline.resume(run_dir)
    assert refused.value.code == "resumes-with-its-command"
    with pytest.raises(ConfigError) as refused:
        syncline.graph.run(stopped, graph_of(1), schedule="priority", workers=2, resume=run_dir)
    assert refused.value.code == "another-graph"
    seen = []
    found = syncline.graph.run(
        stopped, graph, schedule="priority", workers=3, resume=run_dir, progress=lambda numbers: seen.append(numbers)
    )
    for command, code in (("audit", "no-samples"), ("show", "no-model")):
        with pytest.raises(ConfigError) as refused:
            CliRunner().invoke(app, [command, run_dir], catch_exceptions=False)
        assert refused.value.code == code
    assert found.values.tolist() == expected.values.tolist()
    assert (found.rounds, found.updates) == (expected.rounds, expected.updates)
    assert seen
    assert seen[0]["rounds"] > 12


def test_the_mistake_of_a_program_is_reported_as_in_one_process(tmp_path):
    def update(v):
        return v.value * (np.nan if v.round == 2 else 1.0) + 1.0

    with pytest.raises(DataError) as caught:
        syncline.graph.run(update, graph_of(), workers=2, out=str(tmp_path))
    assert caught.value.code == "nan-value"
