"""Graphs to learn from: features and labels of nodes, and which of them to train and to test on.

Here: `NodeData`, and finding these in the fields of a graph. Free of torch: the planner counts the nodes before any
worker starts. Not here: the graph itself (`graph.py`), words in texts (`words.py`), the split that papers on Cora use
(`planetoid.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from syncline.errors import ConfigError, DataError, UnknownName, check_options
from syncline.graphs.foreign import as_graph
from syncline.graphs.graph import Graph
from syncline.graphs.planetoid import read_planetoid
from syncline.graphs.words import bag_of_words

__all__ = ["NodeData", "node_data"]

_LABELS = ("y", "label", "labels", "class")
_SPLITS = ("train_mask", "val_mask", "test_mask", "split")
_OPTIONS = ("labels", "features", "words", "test", "directed")
_TEST_SHARE = 0.2
_WORDS = 5000
_PREFIX = "graph:"
UNLABELED = -1
"""In place of a class."""


class NodeData:
    """A graph whose nodes have features and, some of them, a class; made by `syncline.graph.node_data`.

    `len` counts the nodes to train on. Edges count in both directions, each pair of neighbors once.
    """

    def __init__(
        self,
        graph: Graph,
        features: Any,
        labels: np.ndarray,
        train: np.ndarray,
        test: np.ndarray,
        *,
        name: str = "graph",
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        self.edges = Graph((graph.sources, graph.targets), size=graph.size).undirected()
        """The neighbors alone."""
        self.features, self.labels = features, labels
        self.train, self.test = train, test
        self.class_names = class_names
        self.classes = int(labels.max()) + 1 if len(labels) else 0
        self.__name__ = name
        """What the plan calls the data."""

    def __len__(self) -> int:
        return len(self.train)

    def fetch(self, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of nodes to train on, and their classes."""
        nodes = self.train[np.asarray(indices, np.int64)]
        return nodes, self.labels[nodes]

    @property
    def fingerprint(self) -> str:
        """Of everything that training depends on."""
        digest = hashlib.sha256()
        dense = [self.features] if isinstance(self.features, np.ndarray) else [
            self.features.data, self.features.indices, self.features.indptr
        ]  # fmt: skip
        for part in (self.edges.sources, self.edges.targets, self.labels, self.train, *dense):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        return (
            f"NodeData({self.edges.size:,} nodes, {self.edges.edge_count // 2:,} edges, {self.features.shape[1]:,} "
            f"features, {self.classes} classes; {len(self.train):,} to train on, {len(self.test):,} to test on)"
        )


def node_data(
    source: Any,
    *,
    labels: str | None = None,
    features: str | Sequence[str] | None = None,
    words: int = _WORDS,
    test: float = _TEST_SHARE,
    directed: bool = True,
) -> NodeData:
    """A graph to learn from: a Graph, a path or name, or a graph of another library, with its features and labels.

    Args:
        source: As for `syncline.Graph.of`; 'cora' has the split that papers use.
        labels: The field with the classes; by default y, label, labels or class.
        features: The fields with the features; by default x, or else all other numbers and texts.
        words: Of texts, so many of the most frequent words become features.
        test: The share of labeled nodes to test on, drawn at random, if no field train_mask or split says which.
        directed: For files: whether each edge is listed once for each direction.
    """
    if isinstance(source, NodeData):
        return source
    name = source.removeprefix(_PREFIX) if isinstance(source, str) else None
    if name == "cora" and labels is None and features is None:
        return _public_cora()
    graph = as_graph(source if name is None else name, **({} if name is None else {"directed": directed}))
    label_field = labels or ("section" if name == "debian" else _label_field(graph))
    if label_field not in graph.nodes:
        raise UnknownName.among("node field", label_field, graph.nodes)
    classes, class_names = _classes(graph.nodes[label_field], label_field)
    train, held_out = _split(graph, classes, test)
    chosen = [features] if isinstance(features, str) else list(features or _feature_fields(graph, label_field))
    found = NodeData(
        graph,
        _features(graph, chosen, words),
        classes,
        train,
        held_out,
        name="graph" if name is None or "," in name else name.rstrip("/").rpartition("/")[2],
        class_names=class_names,
    )
    _check_labeled(found, label_field)
    return found


def located_node_data(name: str, options: dict[str, Any]) -> NodeData:
    """The graph that `--data NAME(OPTIONS)` means."""
    check_options(f"The graph {name}", options, _OPTIONS)
    return node_data(name, **options)


def _public_cora() -> NodeData:
    graph, features, labels, train, test = read_planetoid("cora")
    return NodeData(graph, features, labels, train, test, name="cora")


def _label_field(graph: Graph) -> str:
    found = next((name for name in _LABELS if name in graph.nodes), None)
    if found is None:
        fields = ", ".join(graph.nodes) or "none"
        raise DataError(
            f"The nodes of this graph have no labels: none of their fields ({fields}) is called "
            f"{', '.join(_LABELS[:-1])} or {_LABELS[-1]}. Say which field has the classes: labels=NAME, or on the "
            "command line --data \"graph:nodes.csv,edges.csv(labels='NAME')\".",
            code="no-labels", fields=list(graph.nodes),
        )  # fmt: skip
    return found


def _classes(field: Any, name: str) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """A class for each node, from 0; -1 where there is none. Texts are numbered in alphabetical order."""
    if field.ndim != 1:
        raise DataError(
            f"The labels in {name!r} have the shape {field.shape}, but must be one class for each node.",
            code="label-shape", field=name, shape=tuple(field.shape),
        )  # fmt: skip
    if field.dtype.kind in "iu":
        return field.astype(np.int64), None
    if field.dtype.kind == "f":
        raise DataError(
            f"The labels in {name!r} are fractions, but must be classes: integers from 0, or names. If a column of "
            "integers has empty cells, write -1 there.",
            code="label-type", field=name,
        )  # fmt: skip
    texts = np.array(["" if value is None else str(value) for value in field])
    names = sorted(set(texts.tolist()) - {""})
    number = {text: place for place, text in enumerate(names)}
    return np.array([number.get(text, UNLABELED) for text in texts.tolist()], np.int64), tuple(names)


def _split(graph: Graph, labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The nodes to train and to test on, in ascending order."""
    labeled = labels >= 0
    fields = graph.nodes
    if "train_mask" in fields:
        rest = fields.get("test_mask", np.zeros(graph.size, bool))
        return np.flatnonzero(fields["train_mask"]), np.flatnonzero(np.asarray(rest, bool) & labeled)
    if "split" in fields:
        parts = np.array([str(part) for part in fields["split"]])
        return np.flatnonzero(parts == "train"), np.flatnonzero((parts == "test") & labeled)
    if not 0 <= share < 1:
        raise ConfigError.for_setting("test", share, "a share of the nodes: 0 or more, and less than 1")
    nodes = np.flatnonzero(labeled)
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(0))).permutation(nodes)
    cut = round(share * len(nodes))
    return np.sort(order[cut:]), np.sort(order[:cut])


def _feature_fields(graph: Graph, label_field: str) -> list[str]:
    if "x" in graph.nodes:
        return ["x"]
    names = graph.names
    others = [name for name in graph.nodes if name not in (label_field, *_LABELS, *_SPLITS)]
    return [name for name in others if names is None or list(graph.nodes[name]) != list(names)]


def _features(graph: Graph, chosen: Sequence[str], words: int) -> Any:
    """The features of all nodes: a float32 array, or a sparse matrix if they are mostly zero."""
    from scipy.sparse import csr_matrix, hstack

    if not chosen:
        raise DataError(
            "The nodes of this graph have no features: they have no other fields than labels and names. Add a field "
            "x, for instance with a one for each node: nodes={'x': numpy.eye(size)}.",
            code="no-features",
        )  # fmt: skip
    parts: list[Any] = []
    for name in chosen:
        if name not in graph.nodes:
            raise UnknownName.among("node field", name, graph.nodes)
        field = graph.nodes[name]
        if hasattr(field, "indptr"):
            parts.append(field.astype(np.float32))
        elif field.dtype.kind in "fiub":
            parts.append(field.reshape(len(field), -1).astype(np.float32))
        else:
            parts.append(bag_of_words(["" if text is None else str(text) for text in field], words))
    if all(isinstance(part, np.ndarray) for part in parts):
        dense = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return csr_matrix(dense) if np.count_nonzero(dense) < 0.1 * dense.size else dense
    return hstack([csr_matrix(part) for part in parts], format="csr", dtype=np.float32)


def _check_labeled(data: NodeData, field: str) -> None:
    """`DataError` unless there are nodes to train on, and all of them have a label."""
    missing = data.train[data.labels[data.train] < 0]
    if len(missing):
        raise DataError(
            f"{len(missing):,} of the {len(data.train):,} nodes to train on have no label in {field!r}, the first of "
            f"them node {int(missing[0]):,}. Give them labels, or take them out of train_mask or split.",
            code="missing-labels", field=field, count=len(missing), first=int(missing[0]),
        )  # fmt: skip
    if not len(data.train):
        raise DataError(
            f"No node to train on has a label in {field!r}: there is nothing to learn from.",
            code="no-labels", fields=[field],
        )  # fmt: skip
