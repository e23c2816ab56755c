"""Can a few physical terms predict training steps of GPT on GPUs that we do not have?

The data are 720 measured configurations of tensor, data and pipeline parallelism on eight A100 (Bang et al., vTrain,
MICRO 2024, whose own predictions are wrong by 8.37% on average). A step is predicted as a sum of terms with one
constant each, none of them negative. The constants are fitted on a fifth of the rows, drawn at random; the error is
that on all other rows.

    python benchmarks/vtrain/check.py ../shared/data/vtrain/measured_8xa100.csv

Needs scipy, which comes with scikit-learn. Ends with code 1 if the mean error exceeds 8% for one of the draws.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

COLUMNS = ("gpus", "batch", "micro", "hidden", "heads", "layers", "tokens", "tensor", "data", "pipeline", "ms")
VOCABULARY = 51200
LIMIT = 0.08
DRAWS = 10
ROUNDS = 30


def read(path: Path) -> dict[str, np.ndarray]:
    with path.open() as file:
        rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
    return dict(zip(COLUMNS, np.array(rows).T, strict=True))


def terms(c: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What each term is proportional to. 1F1B takes m + p - 1 turns of a stage, each with L/p layers."""
    b, h, s, t, p = c["micro"], c["hidden"], c["tokens"], c["tensor"], c["pipeline"]
    micro_batches = c["batch"] / (c["data"] * b)
    turns = micro_batches + p - 1
    layers = c["layers"] / p * turns
    activations = layers * b * s * h
    parameters = 12 * c["layers"] * h * h / (t * p) + VOCABULARY * h / t
    return {
        "products of matrices": layers * 72 * b * s * h * h / t,
        "softmax": layers * b * c["heads"] * s * s / t,
        "operations on activations": activations,
        "starting the kernels of a layer": layers,
        "sums of a layer over slices: rounds": layers * (t - 1),
        "sums of a layer over slices: start": layers * (t > 1),
        "sums of a layer over slices: bytes beyond a pair": activations * (t >= 4),
        "logits": micro_batches * 6 * b * s * h * VOCABULARY / t,
        "sum of gradients": parameters * 2 * (c["data"] - 1) / c["data"],
        "a turn": turns,
        "a step": np.ones_like(b),
    }


def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Constants, none negative, with a small mean of relative errors: squares, reweighted by the errors' size."""
    scale = x.max(axis=0)
    weights = 1 / y
    for _ in range(ROUNDS):
        constants, _ = nnls(x / scale * weights[:, None], y * weights)
        errors = np.abs(x / scale @ constants - y) / y
        weights = 1 / y / np.sqrt(np.maximum(errors, 0.01))
    return constants / scale


def main(path: Path) -> int:
    columns = read(path)
    parts = terms(columns)
    x, y = np.stack(list(parts.values()), axis=1), columns["ms"]
    means = []
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(y))
        seen, unseen = order[: len(y) // 5], order[len(y) // 5 :]
        constants = fit(x[seen], y[seen])
        errors = np.abs(x[unseen] @ constants - y[unseen]) / y[unseen]
        means.append(errors.mean())
        print(f"draw {draw}: {len(seen)} rows fitted, {len(unseen)} predicted: mean error {errors.mean():.2%}, "
              f"median {np.median(errors):.2%}, 95th percentile {np.quantile(errors, 0.95):.1%}")  # fmt: skip
    print("\nPart of a step, median over all rows, with the constants of the last draw:")
    for name, part in zip(parts, np.median(x * constants / (x @ constants)[:, None], axis=0), strict=True):
        print(f"  {part:6.1%}  {name}")
    print(f"\nMean error over the draws: {np.mean(means):.2%}; the worst draw: {max(means):.2%}; limit: {LIMIT:.0%}.")
    return int(max(means) > LIMIT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
