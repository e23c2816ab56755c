"""Graphs from files, folders and names.

Here: CSV, Parquet, edge lists, folders with nodes and edges, and the named graphs `cora` and `debian`. Not here: the
graphs of other libraries (`foreign.py`) and the checks (`graph.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from syncline.data.download import environment_data_dir
from syncline.data.mirrors import PublishedDataset, find_file, find_or_download
from syncline.errors import DataError, UnknownName
from syncline.graphs.graph import Graph

NAMES = ("cora", "debian")
_BESIDE = Path("../shared/data")
"""Searched if $SYNCLINE_DATA is not set."""
_TABLES = (".csv", ".csv.gz", ".parquet")
_LISTS = (".txt", ".edges", ".edgelist", ".tsv", ".cites", ".txt.gz", ".edges.gz", ".tsv.gz")


def read_graph(source: str | Path, *, directed: bool = True, memory_limit: str | float | None = None) -> Graph:
    """The graph in a file or folder, or of a name.

    A table has an edge in each row: its columns `source` and `target`, or else the first two; others are fields. A
    folder has nodes.csv (or .csv.gz, .parquet) and edges.csv, as does 'NODES,EDGES': the first column names the
    vertices, and edges use these names, or row numbers from 0. An edge list has two vertices in each line.
    """
    text = str(source)
    options: dict[str, Any] = {"directed": directed, "memory_limit": memory_limit}
    if text in NAMES and not os.path.exists(text):
        return _named(text, options)
    if "," in text and not os.path.exists(text):
        nodes, _, edges = text.partition(",")
        return _from_tables(_existing(nodes), _existing(edges), options)
    path = _existing(text)
    if os.path.isdir(path):
        return _from_folder(path, options)
    if text.endswith(_TABLES):
        return _from_tables(None, path, options)
    if text.endswith(_LISTS):
        return _from_list(path, options)
    raise DataError(
        f"{path} is not a graph that can be read: its name must end in {', '.join((*_TABLES, *_LISTS))}.",
        code="graph-format", path=str(path),
    )  # fmt: skip


def _existing(text: str) -> Path:
    path = Path(text)
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        if path.suffix or len(path.parts) > 1:
            raise DataError(f"There is no file or folder {text}.", code="no-file", path=text)
        raise UnknownName.among("graph", text, NAMES, more="It is no file or folder either.")
    return path


def _named(name: str, options: dict[str, Any]) -> Graph:
    files = {"cora": ("cora.content", "cora.cites"), "debian": ("nodes.csv", "edges.csv")}[name]
    advice = {
        "cora": "Unpack https://linqs-data.soe.ucsc.edu/public/lbc/cora.tgz",
        "debian": "Make nodes.csv (package, section, description) and edges.csv (source, target) of a package index",
    }[name]
    folder = named_folder(name, files, advice)
    return _cora(folder, options) if name == "cora" else _from_folder(folder, options)


def named_folder(name: str, files: tuple[str, ...], advice: str = "") -> Path:
    """The folder of a named graph with these files; DataError says where they come from."""
    advice = advice or f"Put {files[0]} to {files[-1]} of https://github.com/kimiyoung/planetoid/tree/master/data"
    dataset = PublishedDataset(
        title=f"The graph {name!r}", folder=name, files=files, mirrors=(),
        advice=f"{advice} in a folder {name}, and set SYNCLINE_DATA to the folder that it is in.",
    )  # fmt: skip
    beside = _BESIDE if environment_data_dir() is None and _BESIDE.is_dir() else None
    return find_or_download(dataset, beside, None)


def _from_folder(folder: Path, options: dict[str, Any]) -> Graph:
    found = {}
    for part in ("nodes", "edges"):
        places = [folder / f"{part}{ending}" for ending in _TABLES]
        path = next((place for place in places if place.is_file()), None)
        if path is None and part == "edges":
            raise DataError(
                f"{folder} is not a graph: it has no edges.csv, edges.csv.gz or edges.parquet.",
                code="no-edges-file", path=str(folder),
            )  # fmt: skip
        found[part] = path
    assert found["edges"] is not None
    return _from_tables(found["nodes"], found["edges"], options)


def _from_tables(nodes: Path | None, edges: Path, options: dict[str, Any]) -> Graph:
    fields = _columns(edges)
    if len(fields) < 2:
        raise DataError(
            f"{edges} has {len(fields)} column(s), but needs two: source and target.", code="edge-columns",
            path=str(edges),
        )  # fmt: skip
    ends = ("source", "target") if {"source", "target"} <= set(fields) else tuple(fields)[:2]
    pair = np.stack([fields.pop(end) for end in ends]) if len(fields[ends[0]]) else np.zeros((2, 0), np.int64)
    if nodes is None:
        return Graph(pair, edge_fields=fields, **options)
    rows = _columns(nodes)
    names = next(iter(rows.values())).tolist() if rows else []
    return Graph(pair, rows, edge_fields=fields, names=names, **options)


def _columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a table by name."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        table = parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, KeyError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}", code="unreadable", path=str(path)) from error


def _from_list(path: Path, options: dict[str, Any]) -> Graph:
    """Lines of two vertices and perhaps a weight; # and % begin comments."""
    import gzip

    rows: list[list[str]] = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                words = line.replace(",", " ").split()
                if not words or words[0][0] in "#%":
                    continue
                if len(words) not in (2, 3) or (rows and len(words) != len(rows[0])):
                    raise DataError(
                        f"{path}:{number} has {len(words)} values. Each line must have two vertices, and a weight in "
                        "all lines or in none.", code="edge-line", path=str(path), line=number,
                    )  # fmt: skip
                rows.append(words)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}", code="unreadable", path=str(path)) from error
    if not rows:
        return Graph(np.zeros((2, 0), np.int64), **options)
    table = np.array(rows).T
    are_numbers = all(word.isdigit() for word in (*rows[0][:2], *rows[-1][:2]))
    try:
        ends = table[:2].astype(np.int64) if are_numbers else table[:2]
        fields = {"weight": table[2].astype(np.float64)} if len(table) == 3 else {}
    except ValueError as error:
        raise DataError(
            f"{path} has a value that is not a number: {error}", code="edge-line", path=str(path)
        ) from error
    return Graph(ends, edge_fields=fields, **options)


def _cora(folder: Path, options: dict[str, Any]) -> Graph:
    """Papers with their words (`x`) and classes (`y`); an edge leads from a paper to one that it cites."""
    import gzip

    content, cites = find_file(folder, "cora.content"), find_file(folder, "cora.cites")
    assert content is not None, "found before"
    assert cites is not None, "found before"
    with gzip.open(content, "rt") if content.suffix == ".gz" else open(content, encoding="utf-8") as file:
        rows = [line.split() for line in file]
    names = [row[0] for row in rows]
    classes, labels = np.unique([row[-1] for row in rows], return_inverse=True)
    words = np.array([row[1:-1] for row in rows], dtype=np.float32)
    with gzip.open(cites, "rt") if cites.suffix == ".gz" else open(cites, encoding="utf-8") as file:
        pairs = [line.split() for line in file]
    known = {name: number for number, name in enumerate(names)}
    ends = np.array([[known[citing], known[cited]] for cited, citing in pairs]).T
    return Graph(ends, {"x": words, "y": labels, "class": classes[labels]}, names=names, **options)
