"""Small graphs with something to learn, for tests of graph networks."""

from __future__ import annotations

import numpy as np

import syncline


def two_groups(size: int = 60, seed: int = 0, features: int = 8, **fields) -> syncline.Graph:
    """Nodes of three classes; neighbors are mostly of the same class, features say a little about it."""
    random = np.random.RandomState(seed)
    y = np.arange(size) % 3
    ends = random.randint(0, size, (2, size * 6))
    kept = (y[ends[0]] == y[ends[1]]) | (random.random_sample(ends.shape[1]) < 0.2)
    ends = ends[:, kept & (ends[0] != ends[1])]
    x = random.standard_normal((size, features)).astype(np.float32) + np.eye(3)[y] @ np.ones((3, features)) * 0.1
    x[:, :3] += np.eye(3)[y]
    return syncline.Graph(edges=ends, nodes={"x": x.astype(np.float32), "y": y, **fields}, size=size)
