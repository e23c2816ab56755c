"""Cora as papers on graph networks use it: the files `ind.cora.*` with their public split.

Of 2,708 papers, 140 are to train on and 1,000 to test on (Z. Yang, W. Cohen and R. Salakhutdinov, Revisiting
semi-supervised learning with graph embeddings, ICML 2016). Not here: the same graph without a split (`reading.py`).

The files are pickles of Python 2. Reading a pickle can run any code, so nothing is made from them but arrays, sparse
matrices and lists.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from syncline.errors import DataError
from syncline.graphs.graph import Graph
from syncline.graphs.reading import named_folder

_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")


def read_planetoid(name: str) -> tuple[Graph, Any, np.ndarray, np.ndarray, np.ndarray]:
    """The graph, features with sum 1 in each row, labels, and the nodes to train and to test on."""
    from scipy.sparse import diags, vstack

    files = tuple(f"ind.{name}.{part}" for part in _PARTS)
    folder = named_folder(name, files)
    x, _, tx, ty, allx, ally, neighbors = (_unpickle(folder / file) for file in files[:-1])
    shuffled = np.array([int(line) for line in (folder / files[-1]).read_text().split()])
    ordered = np.sort(shuffled)
    features, labels = vstack([allx, tx]).tocsr(), np.concatenate([ally, ty])
    place = np.arange(len(labels))
    place[shuffled] = ordered  # the test nodes are stored in the order of the last file
    features, labels = features[place].astype(np.float32), labels[place].argmax(axis=1)
    sums = np.maximum(np.asarray(features.sum(axis=1)).ravel(), 1)
    ends = np.array([[node, other] for node, others in neighbors.items() for other in others], np.int64).T
    scaled = (diags(1 / sums) @ features).tocsr().astype(np.float32)
    scaled.sort_indices()
    return Graph(ends, size=len(labels)), scaled, labels.astype(np.int64), np.arange(x.shape[0]), ordered


def _unpickle(path: Path) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {error}", code="unreadable", path=str(path)) from error


class _PlainUnpickler(pickle.Unpickler):
    """Makes arrays, sparse matrices and lists, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        from numpy._core import multiarray  # where Python 2's numpy.core is now
        from scipy.sparse import csr_matrix

        known = {
            ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("scipy.sparse.csr", "csr_matrix"): csr_matrix,
            ("collections", "defaultdict"): defaultdict,
            ("__builtin__", "list"): list,
            ("builtins", "list"): list,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which has no place in these files")
        return known[module, name]
