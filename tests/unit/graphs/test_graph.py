"""Graphs from everywhere, and what is wrong with those that are refused."""

from __future__ import annotations

import gzip
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import syncline
from syncline.errors import ConfigError, DataError, UnknownName
from syncline.graphs.partition import METHODS, divide

SHARED = Path(os.environ.get("SYNCLINE_DATA") or Path(__file__).parents[3].parent / "shared" / "data")


def edges_of(graph):
    return sorted((graph.name(int(a)), graph.name(int(b))) for a, b in zip(graph.sources, graph.targets, strict=True))


EXPECTED = [("a", "b"), ("a", "c"), ("b", "c")]


def test_an_edge_index_a_pair_of_arrays_and_a_list_of_pairs_give_the_same_graph():
    made = [
        syncline.Graph(edges=np.array([[0, 1, 0], [1, 2, 2]])),
        syncline.Graph(edges=([0, 1, 0], [1, 2, 2])),
        syncline.Graph(edges=[(0, 1), (1, 2), (0, 2)]),
        syncline.Graph(edges=torch.tensor([[0, 1, 0], [1, 2, 2]])),
    ]
    for graph in made:
        assert (graph.size, graph.edge_count) == (3, 3)
        assert edges_of(graph) == edges_of(made[0])
        assert graph.out_degree.tolist() == [2, 1, 0]
        assert graph.in_degree.tolist() == [0, 1, 2]


def test_files_give_the_same_graph_in_every_format(tmp_path):
    (tmp_path / "e.csv").write_text("source,target,w\na,b,1\nb,c,2\na,c,3\n")
    with gzip.open(tmp_path / "e.csv.gz", "wt") as file:
        file.write((tmp_path / "e.csv").read_text())
    columns = {"w": [1, 2, 3], "target": ["b", "c", "c"], "source": ["a", "b", "a"]}
    parquet.write_table(pa.table(columns), tmp_path / "e.parquet")
    (tmp_path / "e.txt").write_text("# comment\na b 1\nb c 2\n\na c 3\n")
    for name, field in {"e.csv": "w", "e.csv.gz": "w", "e.parquet": "w", "e.txt": "weight"}.items():
        graph = syncline.Graph.of(tmp_path / name)
        assert edges_of(graph) == EXPECTED, name
        assert graph.edge_fields[field].tolist() == [1, 2, 3], name


def test_a_folder_names_its_vertices_and_its_edges_use_names_or_row_numbers(tmp_path):
    (tmp_path / "nodes.csv").write_text("name,x\nc,0.5\na,1.5\nb,2.5\n")
    for edges in ("source,target\na,b\nb,c\na,c\n", "source,target\n1,2\n2,0\n1,0\n"):
        (tmp_path / "edges.csv").write_text(edges)
        for source in (tmp_path, f"{tmp_path}/nodes.csv,{tmp_path}/edges.csv"):
            graph = syncline.Graph.of(source)
            assert edges_of(graph) == EXPECTED
            assert graph.nodes["x"].tolist() == [0.5, 1.5, 2.5]


def test_graphs_of_other_libraries_keep_their_fields():
    network = nx.Graph([("a", "b", {"w": 2.0}), ("b", "c", {"w": 3.0})])
    graph = syncline.Graph.of(network)
    assert edges_of(graph) == [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
    assert sorted(graph.edge_fields["w"]) == [2, 2, 3, 3]
    ends = torch.tensor([[0, 1], [1, 2]])

    class Data(dict):  # as torch_geometric.data.Data
        edge_index, num_nodes = ends, 3

    pyg = syncline.Graph.of(Data(edge_index=ends, x=torch.ones(3, 2), edge_attr=torch.tensor([5.0, 6.0])))
    assert pyg.nodes["x"].shape == (3, 2)
    assert pyg.edge_fields["attr"].tolist() == [5, 6]
    dgl = SimpleNamespace(
        edges=lambda: (ends[0], ends[1]), num_nodes=lambda: 3, ndata={"x": torch.ones(3)}, edata={"w": torch.ones(2)}
    )
    assert edges_of(syncline.Graph.of(dgl)) == edges_of(pyg)


@pytest.mark.skipif(not (SHARED / "cora").is_dir(), reason="needs the shared data")
def test_cora_and_debian_go_by_name(monkeypatch):
    monkeypatch.setenv("SYNCLINE_DATA", str(SHARED))
    cora, debian = syncline.Graph.of("cora"), syncline.Graph.of("debian")
    assert (cora.size, cora.edge_count, cora.nodes["x"].shape) == (2708, 5429, (2708, 1433))
    assert len(np.unique(cora.nodes["y"])) == 7
    assert (debian.size, debian.edge_count) == (63436, 247688)
    assert debian.in_degree[debian.number("libc6")] > 20_000


@pytest.mark.parametrize(
    ("make", "code", "facts"),
    [
        (lambda: syncline.Graph([(0, 1), (2, 7)], size=3), "edge-to-missing-node", {"edge": 1, "vertex": 7}),
        (lambda: syncline.Graph([("a", "z")], names=["a", "b"]), "edge-to-missing-node", {"edge": 0, "vertex": "z"}),
        (lambda: syncline.Graph([(0, -1)]), "edge-to-missing-node", {"vertex": -1}),
        (lambda: syncline.Graph([(0, 1)], {"x": [1.0, np.nan]}), "nan-in-field", {"row": 1, "count": 1}),
        (lambda: syncline.Graph([(0, 1)], edge_fields={"w": [np.nan]}), "nan-in-field", {"row": 0}),
        (lambda: syncline.Graph([(0, 1)], {"x": [1.0]}, size=2), "field-length", {}),
        (lambda: syncline.Graph([(0, 1)], edge_fields={"w": [1, 2]}), "field-length", {"edges": 1}),
        (lambda: syncline.Graph([("a", "b")], names=["a", "b", "a"]), "duplicate-node", {"row": 2}),
        (lambda: syncline.Graph([(0, 1)], size=10**6, memory_limit="1MB"), "graph-too-large", {"limit": 10**6}),
    ],
)
def test_a_graph_that_is_wrong_is_refused_with_the_place(make, code, facts):
    with pytest.raises(DataError) as caught:
        make()
    assert caught.value.code == code
    assert facts.items() <= caught.value.facts.items()


def test_files_that_are_wrong_are_refused(tmp_path):
    with pytest.raises(UnknownName, match="cora"):
        syncline.Graph.of("coras")
    (tmp_path / "e.txt").write_text("1 2\n3\n")
    (tmp_path / "one.csv").write_text("source\n1\n")
    (tmp_path / "e.xyz").write_text("")
    found = {}
    for name in ("e.txt", "one.csv", "e.xyz", "none.csv", "."):
        with pytest.raises(DataError) as caught:
            syncline.Graph.of(str(tmp_path / name))
        found[name] = caught.value.code
    assert found == {
        "e.txt": "edge-line", "one.csv": "edge-columns", "e.xyz": "graph-format", "none.csv": "no-file",
        ".": "no-edges-file",
    }  # fmt: skip


@pytest.mark.parametrize("method", [m for m in METHODS if m != "metis"])
def test_partitioners_place_everything_and_count_what_is_cut(method):
    rng = np.random.default_rng(0)
    graph = syncline.Graph(rng.integers(0, 500, (2, 3000)), size=500)
    found = divide(graph, 4, method)
    assert set(found.edges) == set(range(4))
    assert found.balance < 1.3
    pairs = set()
    for edge, (a, b) in enumerate(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)):
        part = int(found.edges[edge])
        pairs |= {(v, part) for v in ((a, b) if found.cuts_vertices else (a,)) if part != found.vertices[v]}
    assert found.copies == len(pairs)
    assert found.halo_bytes(8) == len(pairs) * 8 * (2 if found.cuts_vertices else 1)
    assert divide(graph, 1, method).copies == 0


def test_a_greedy_vertex_cut_copies_fewer_vertices_than_a_random_one():
    rng = np.random.default_rng(0)
    graph = syncline.Graph((rng.zipf(1.6, 5000) % 1000, rng.integers(0, 1000, 5000)), size=1000)
    assert divide(graph, 8, "vertex-cut").copies < 0.8 * divide(graph, 8, "vertex-hash").copies


def test_metis_is_used_or_asked_for():
    graph = syncline.Graph([(0, 1), (2, 3)], directed=False)
    if importlib.util.find_spec("pymetis"):
        assert divide(graph, 2, "metis").cut_edges(graph) == 0
    else:
        with pytest.raises(ConfigError) as caught:
            divide(graph, 2, "metis")
        assert caught.value.code == "no-metis"
