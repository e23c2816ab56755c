"""Features, labels and splits of graphs to learn from, and what is wrong with those that are refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
from graph_examples import two_groups

import syncline
from syncline.errors import ConfigError, DataError, UnknownName
from syncline.graphs.node_data import node_data
from syncline.graphs.planetoid import _unpickle
from syncline.task import Task


def test_texts_become_words_and_names_do_not(tmp_path):
    rows = ["name,section,about", "a,web,A fast server", "b,web,server for mail", "c,math,fast sums", "d,,sums"]
    (tmp_path / "nodes.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "edges.csv").write_text("source,target\na,b\nc,d\nb,a\n")
    data = node_data(str(tmp_path), labels="section", test=0.0)
    assert data.class_names == ("math", "web")
    assert data.labels.tolist() == [1, 1, 0, -1]
    assert data.train.tolist() == [0, 1, 2]
    assert data.features.shape == (4, 6)  # a, fast, server, for, mail, sums: not the names; "a" is a word of a text
    assert np.allclose(np.sqrt(data.features.multiply(data.features).sum(axis=1)), 1)
    assert data.edges.edge_count == 4  # each pair of neighbors once in both directions


def test_masks_say_what_to_train_and_to_test_on():
    train, test = np.arange(60) < 30, np.arange(60) >= 50
    data = node_data(two_groups(train_mask=train, test_mask=test))
    assert data.train.tolist() == list(range(30))
    assert data.test.tolist() == list(range(50, 60))
    split = node_data(two_groups(split=np.where(train, "train", "test")))
    assert (len(split), len(split.test)) == (30, 30)


def test_without_masks_a_fifth_is_held_out_and_always_the_same():
    first, second = node_data(two_groups()), node_data(two_groups())
    assert (len(first.train), len(first.test)) == (48, 12)
    assert not set(first.train) & set(first.test)
    assert first.train.tolist() == second.train.tolist()
    assert first.fingerprint == second.fingerprint != node_data(two_groups(seed=1)).fingerprint


def test_features_that_are_mostly_zero_are_kept_sparse():
    graph = two_groups()
    sparse = scipy.sparse.random(60, 50, 0.05, format="csr", dtype=np.float32, random_state=0)
    from_dense = node_data(syncline.Graph(edges=(graph.sources, graph.targets),
                                          nodes={"x": sparse.toarray(), "y": graph.nodes["y"]}))  # fmt: skip
    from_sparse = node_data(syncline.Graph(edges=(graph.sources, graph.targets),
                                           nodes={"x": sparse, "y": graph.nodes["y"]}))  # fmt: skip
    assert (from_dense.features != from_sparse.features).nnz == 0


@pytest.mark.parametrize(
    ("make", "error", "code"),
    [
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"x": np.eye(2)}), DataError, "no-labels"),
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"y": [0, 1]}), DataError, "no-features"),
        (lambda: syncline.Graph(edges=[(0, 5)], nodes={"x": np.eye(2), "y": [0, 1]}), DataError,
         "edge-to-missing-node"),
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"x": [[1.0], [np.nan]], "y": [0, 1]}), DataError,
         "nan-in-field"),
        (lambda: syncline.Graph(edges=[(0, 1)], size=2, nodes={
            "x": scipy.sparse.csr_matrix([[1.0, 0.0], [0.0, np.nan]]), "y": [0, 1]}), DataError, "nan-in-field"),
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"x": np.eye(2), "y": [0, -1], "train_mask": [True, True]}),
         DataError, "missing-labels"),
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"x": np.eye(2), "y": [-1, -1]}), DataError, "no-labels"),
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"x": np.eye(2), "y": [0.0, 1.0]}), DataError, "label-type"),
        (lambda: syncline.Graph(edges=[(0, 1)], nodes={"x": np.eye(2), "y": np.eye(2)}), DataError, "label-shape"),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_be_learned_from_is_refused(make, error, code):
    with pytest.raises(error) as caught:
        node_data(make())
    assert caught.value.code == code


def test_an_edge_in_a_file_to_a_node_that_is_not_there_is_named(tmp_path):
    (tmp_path / "nodes.csv").write_text("name,y,x\na,0,1.5\nb,1,2.5\n")
    (tmp_path / "edges.csv").write_text("source,target\na,b\nb,zz\n")
    with pytest.raises(DataError) as caught:
        node_data(str(tmp_path))
    assert caught.value.code == "edge-to-missing-node"
    assert (caught.value.facts["edge"], caught.value.facts["vertex"]) == (1, "zz")


def test_unknown_fields_and_shares_are_refused():
    with pytest.raises(UnknownName):
        node_data(two_groups(), labels="klass")
    with pytest.raises(UnknownName):
        node_data(two_groups(), features=["z"])
    with pytest.raises(ConfigError):
        node_data(two_groups(), test=1.5)


def test_graph_networks_need_graphs_and_graphs_need_graph_networks():
    with pytest.raises(ConfigError) as caught:
        Task(model="gcn", data=(np.eye(3), np.arange(3)))
    assert caught.value.code == "needs-graph"
    with pytest.raises(ConfigError) as caught:
        Task(model="mlp", data=two_groups())
    assert caught.value.code == "needs-graph-network"


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_reading_the_files_of_planetoid_runs_no_code(tmp_path, capsys):
    path = tmp_path / "ind.cora.x"
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(DataError) as caught:
        _unpickle(path)
    assert caught.value.code == "unreadable"
    assert capsys.readouterr().out == ""
