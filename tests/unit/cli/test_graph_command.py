"""`syncline graph`: what it prints, saves and refuses."""

from __future__ import annotations

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError, DataError, Interrupted


@pytest.fixture
def edges(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("source,target,km,rating\nhub,a,1,1\na,hub,2,2\nb,hub,3,3\nb,a,4,4\nx,y,5,5\n")
    return str(path)


def invoke(*arguments):
    return CliRunner().invoke(app, ["graph", *map(str, arguments)], catch_exceptions=False)


def test_pagerank_prints_the_top_by_name_and_saves_all(edges, tmp_path):
    for ending in ("csv", "parquet", "npy"):
        done = invoke(
            "pagerank", "--data", edges, "--schedule", "priority", "--top", 2, "--out", tmp_path / f"r.{ending}"
        )
        assert done.exit_code == 0
        assert {line.split()[1] for line in done.stdout.splitlines()} == {"hub", "a"}  # equal ranks
    ranks = np.load(tmp_path / "r.npy")
    assert abs(ranks.sum() - 1) < 1e-12
    assert parquet.read_table(tmp_path / "r.parquet").to_pydict() == {
        "vertex": ["a", "b", "hub", "x", "y"], "value": ranks.tolist(),
    }  # fmt: skip
    assert (tmp_path / "r.csv").read_text().splitlines()[1] == f"a,{ranks[0]}"


def test_every_program_runs(edges):
    shown = {
        "components": "2 different components", "k-core": "2 ", "triangles": "1 triangles",
        "coloring": "3 different colors", "label-propagation": "2 communities",
        "shortest-paths": "3 of 5 vertices", "partition": "vertex-cut",
    }  # fmt: skip
    for program, text in shown.items():
        more = ("--source", "b", "--weight", "km") if program == "shortest-paths" else ()
        done = invoke(program, "--data", edges, *more)
        assert done.exit_code == 0, program
        assert text in done.stdout, program


def test_ratings_are_factored(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,rating\n" + "".join(f"u{u},i{i},{u * i}\n" for u in (1, 2, 3) for i in (1, 2)))
    done = invoke("als", "--data", path, "--factors", 1, "--regularization", 0.0001, "--out", tmp_path / "f.npy")
    assert float(done.stdout.split()[0]) < 0.01
    assert np.load(tmp_path / "f.npy").shape == (5, 1)


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        (Interrupted("Saved. To resume: the same command with --resume runs/x."), "--resume runs/x"),
        (KeyboardInterrupt(), "Nothing was saved"),
    ],
)
def test_a_run_that_is_stopped_says_how_to_continue(edges, monkeypatch, stopped, said):
    def stop(graph, **settings):
        raise stopped

    monkeypatch.setattr("syncline.graph.components", stop)
    done = invoke("components", "--data", edges)
    assert done.exit_code == 130
    assert said in done.stderr


def test_what_cannot_be_done_is_refused_before_the_work(edges, tmp_path):
    for arguments, error, code in (
        (("pagerank", "--data", edges, "--workers", 9), ConfigError, "invalid-setting"),
        (("pagerank", "--data", edges, "--out", tmp_path / "r.txt"), ConfigError, "ending"),
        (("pagerank", "--data", edges, "--memory-limit", "0.0001MB"), DataError, "graph-too-large"),
        (("shortest-paths", "--data", edges, "--source", "nobody"), ConfigError, "no-vertex"),
    ):
        with pytest.raises(error) as caught:
            invoke(*arguments)
        assert caught.value.code == code


@pytest.mark.parametrize("data", ["9" * 5000, "x" * 300 + ".csv", "a,b", "/dev/null", "/", "\udcff", "", "a\0b"])
def test_what_is_no_graph_is_a_clear_error(data):
    with pytest.raises((ConfigError, DataError)):
        invoke("components", "--data", data)


def test_a_vertex_with_a_strange_name_is_a_clear_error(edges):
    for vertex in ("9" * 5000, "²", "-1", ""):
        with pytest.raises(ConfigError) as caught:
            invoke("shortest-paths", "--data", edges, "--source", vertex)
        assert caught.value.code == "no-vertex"
