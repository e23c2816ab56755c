"""Graph networks in real runs: any number of workers, killed workers, halos that are old, and the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from graph_examples import two_groups
from real_runs import final_state, relative_difference, same_bits
from real_runs import syncline as command

import syncline
from syncline.errors import ConfigError
from syncline.observe.report.load import load
from syncline.observe.report.report_page import as_html
from syncline.telemetry.events import ExchangeStats, GraphDivided, Progress, WorkerFailure
from syncline.telemetry.run_dir import RunDir

NETWORK = "gcn(hidden=8, double=True)"


def fit(out, workers, model=NETWORK, data=None, **settings):
    given = {"epochs": 20, "quiet": True, "threads": 1, "out": str(out), **settings}
    return syncline.train(model=model, data=data or two_groups(), workers=workers, **given)


def state_of(result):
    return final_state(result.run_dir)["model"]


@pytest.fixture
def files(tmp_path):
    """A graph as two files, on the command line."""
    graph = two_groups()
    names = [f"x{number}" for number in range(graph.nodes["x"].shape[1])]
    rows = [",".join(["node", "y", *names])]
    rows += [
        ",".join([f"n{number}", "abc"[y], *(f"{value:.6f}" for value in x)])
        for number, (y, x) in enumerate(zip(graph.nodes["y"], graph.nodes["x"], strict=True))
    ]
    (tmp_path / "nodes.csv").write_text("\n".join(rows) + "\n")
    edges = [f"n{a},n{b}" for a, b in zip(graph.sources, graph.targets, strict=True)]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
    return tmp_path


def test_two_and_three_parts_give_one_workers_parameters(tmp_path):
    alone = state_of(fit(tmp_path, 1))
    assert relative_difference(alone, state_of(fit(tmp_path, 2))) < 1e-12
    assert relative_difference(alone, state_of(fit(tmp_path, 3, partition="vertex-cut"))) < 1e-12


def test_workers_that_share_no_memory_exchange_halos_through_torch(tmp_path):
    alone, two = fit(tmp_path, 1, epochs=5), fit(tmp_path, 2, epochs=5, collective="process-group", halo="stale(0)")
    assert relative_difference(state_of(alone), state_of(two)) < 1e-12


def test_one_two_and_four_workers_draw_the_same_neighbors(tmp_path):
    alone, *others = (state_of(fit(tmp_path, n, "sage(neighbors=2, double=True)", batch=16)) for n in (1, 2, 4))
    assert max(relative_difference(alone, other) for other in others) < 1e-12


def test_a_killed_worker_changes_no_bit_if_it_is_replaced_and_the_ledger_has_each_node_once(files):
    words = [
        "train", "gcn(hidden=8)", "--data", "graph:nodes.csv,edges.csv", "--workers", "2", "--epochs", "40",
        "--evaluate-every", "0", "--on-worker-failure", "replace-only", "--name",
    ]  # fmt: skip
    faults = {"SYNCLINE_FAULTS": "kill worker 1 at step 10; kill worker 0 at step 25"}
    for name, env in (("whole", {}), ("killed", faults)):
        done = command(*words, name, cwd=files, env=env)
        assert done.code == 0, done.out + done.err
    events = list(RunDir(files / "runs" / "killed").read_events())
    assert sum(isinstance(event, WorkerFailure) for event in events) == 2
    whole, killed = (final_state(files / "runs" / name)["model"] for name in ("whole", "killed"))
    assert same_bits(whole, killed)
    audit = command("audit", "runs/killed", cwd=files)
    assert audit.code == 0, audit.out + audit.err
    divided = [event for event in events if isinstance(event, GraphDivided)]
    assert {(event.parts, event.nodes) for event in divided} == {(2, 60)}


def test_survivors_divide_the_graph_anew(tmp_path, files):
    words = ["train", NETWORK, "--data", "graph:nodes.csv,edges.csv", "--epochs", "20", "--on-worker-failure", "shrink"]
    for name, workers, faults in (("alone", 1, {}), ("shrunk", 3, {"SYNCLINE_FAULTS": "kill worker 1 at step 8"})):
        done = command(*words, "--workers", str(workers), "--name", name, cwd=files, env=faults)
        assert done.code == 0, done.out + done.err
    alone, shrunk = (final_state(files / "runs" / name)["model"] for name in ("alone", "shrunk"))
    assert relative_difference(alone, shrunk) < 1e-12
    parts = [e.parts for e in RunDir(files / "runs" / "shrunk").read_events() if isinstance(e, GraphDivided)]
    assert parts == [3, 2]


def test_stale_halos_move_a_third_of_the_bytes_and_the_report_shows_it(tmp_path):
    sent = {}
    for halo in ("exact", "stale(2)"):
        result = fit(tmp_path, 2, partition="hash", halo=halo, epochs=60)
        events = list(RunDir(result.run_dir).read_events())
        sent[halo] = sum(event.bytes_inside for event in events if isinstance(event, Progress))
        ages = {age for event in events if isinstance(event, ExchangeStats) for age in event.staleness}
    assert sent["stale(2)"] == pytest.approx(sent["exact"] / 3, rel=0.05)
    assert ages == {0, 1, 2}
    page = as_html(load([result.run_dir], lambda _: False))
    assert "of the edges are cut" in page
    assert "up to 2 steps old" in page


def test_an_interrupted_run_continues_where_it_was(tmp_path):
    whole = fit(tmp_path, 2, name="whole")
    fit(tmp_path, 2, name="cut", epochs=11)
    resumed = syncline.resume(tmp_path / "cut", quiet=True, epochs=20)
    assert same_bits(state_of(whole), state_of(resumed))


def test_the_trained_model_answers_for_any_node(tmp_path):
    result = fit(tmp_path, 2, "gcn", epochs=100)
    assert result.metrics["test/accuracy"] > 0.6
    graph = two_groups()
    answers = result.model(torch.arange(graph.size)).argmax(1).numpy()
    assert np.mean(answers == graph.nodes["y"]) > 0.8
    with pytest.raises(ConfigError) as caught:
        syncline.export(result.run_dir, tmp_path / "model.onnx")
    assert caught.value.code == "graph-network"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"halo": "fresh"}, "invalid-setting"),
        ({"strategy": "sparknet"}, "layout"),
        ({"layout": "sharded"}, "graph-setting"),
        ({"accumulate": 2}, "graph-setting"),
        ({"partition": "round"}, "unknown-name"),
        ({"model": "sage(neighbors=3)", "halo": "stale(1)"}, "no-partition"),
    ],
)
def test_settings_that_mean_nothing_for_a_graph_are_refused(tmp_path, settings, code):
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, 2, **settings)
    assert caught.value.code == code


def test_explain_names_the_division(files):
    done = command("explain", "gcn", "--data", "graph:nodes.csv,edges.csv", "--halo", "stale(2)", cwd=files)
    assert done.code == 0, done.err
    assert "partitioned(greedy, stale=2)" in done.out
    assert "up to 2 steps old" in done.out


def test_samples_have_no_partition(tmp_path):
    done = command("train", "mlp", "--data", "digits", "--partition", "hash", "--json", cwd=tmp_path)
    assert done.code == 1
    assert "no graph network" in done.err + json.dumps(done.out)


def test_a_worker_without_any_node_to_train_on_takes_part(tmp_path):
    mask = np.arange(60) < 5
    data = two_groups(train_mask=mask, test_mask=~mask)
    alone, shared = (state_of(fit(tmp_path, n, data=data, partition="blocks")) for n in (1, 3))
    assert relative_difference(alone, shared) < 1e-12
