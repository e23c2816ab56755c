"""Linear regression with an elastic-net penalty, by coordinate descent.

Minimizes |y - Xw - b|^2 / (2 n) + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio) |w|^2 / 2, as scikit-learn does. A block
is a column of X. Blocks are related by their correlation. A survey computes all gradients X^T r, a part of the columns
per lane; from these follow what each column would change, and the duality gap.

Columns that several lanes change at once can overshoot together. Then the step is shortened to the best point on the
line, so the objective never grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from syncline.blocks.app import App, Arrays, Round, Verdict, check_number, share, start_from
from syncline.blocks.schedule import By
from syncline.blocks.tables import Table, check_width
from syncline.compute.kernels.descent import descend

_PASSES = 3
"""A lane goes over its columns at most this often in a round."""
_SIZE = 512
_LEFT = 0.1
"""A survey is due when the largest change is down to this share of what the last survey found."""
_MOST_ROUNDS = 100
"""A survey is due after so many rounds in any case."""
_SHOWN = 10
_SAMPLED, _LONG = 500, 4000
"""So many rows or more show how columns correlate; columns of so many rows are worth comparing from the beginning."""
_CROWDED = 0.5
"""Relations are checked once a step was shortened to less than this. Two lanes are always good for half of it."""


@dataclass(frozen=True, kw_only=True)
class ElasticNet(App):
    """Sparse linear regression; few of the coefficients are not zero."""

    name: ClassVar[str] = "elastic-net"
    summary: ClassVar[str] = "linear regression with an L1 and an L2 penalty"
    data: ClassVar = "table"
    orders: ClassVar[tuple[By, ...]] = ("change", "random", "cyclic")
    tolerance: ClassVar[float] = 1e-6

    alpha: float = 1.0
    l1_ratio: float = 0.5
    intercept: bool = True

    def __post_init__(self) -> None:
        check_number(self.name, "alpha", self.alpha, least=0, above=True)
        check_number(self.name, "l1_ratio", self.l1_ratio, least=0, most=1, above=True)

    def prepare(self, data: Any) -> Arrays:
        """Columns with mean 0 if there is an intercept, one after the other in memory."""
        table = Table.of(data, targets="numbers")
        x = np.array(table.x, dtype=np.float64, order="F")
        y = np.array(table.y, dtype=np.float64)
        means, mean = np.zeros(x.shape[1]), 0.0
        if self.intercept:
            means, mean = x.mean(axis=0), float(y.mean())
            x -= means
            y -= mean
        squares = np.einsum("ij,ij->j", x, x)
        # What rounding leaves of a constant column is no column.
        squares[squares <= 1e-24 * len(x) * (means**2 + 1e-300)] = 0.0
        return {"x": x, "y": y, "squares": squares, "means": means, "mean": np.array(mean)}

    def count(self, problem: Arrays) -> int:
        return int(problem["x"].shape[1])

    def size(self, problem: Arrays, lanes: int) -> int:
        return -(-min(_SIZE, self.count(problem)) // lanes)

    def start(self, problem: Arrays, seed: int, warm: Arrays | None) -> Arrays:
        del seed
        weights = np.zeros(self.count(problem))
        if warm is not None:
            weights[:] = start_from(self.name, warm, "coefficients", weights.shape)
        rest = problem["y"] - problem["x"] @ weights if weights.any() else problem["y"].copy()
        return {"weights": weights, "rest": rest, "shortest": np.array(1.0)}

    def is_crowded(self, state: Arrays) -> bool:
        """Unless columns are long, comparing takes longer than updating, so it has to be worth it."""
        return bool(len(state["rest"]) >= _LONG or state["shortest"] < _CROWDED)

    def related(self, problem: Arrays, blocks: np.ndarray, others: np.ndarray, apart: float) -> np.ndarray | None:
        """By the correlation of their columns."""
        if apart >= 1:
            return None
        one, other = _directions(problem["x"], blocks), _directions(problem["x"], others)
        return np.asarray(np.abs(one @ other.T) > apart)

    def update(self, problem: Arrays, state: Arrays, blocks: np.ndarray, at: Round, lane: int) -> Arrays:
        del at, lane
        rest, weights = state["rest"].copy(), state["weights"][blocks]
        change = descend(
            problem["x"], blocks, rest, weights, problem["squares"], *self._penalties(problem), passes=_PASSES
        )
        return {"weights": weights - state["weights"][blocks], "rest": rest - state["rest"], "change": change}

    def merge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays], lanes: Sequence[np.ndarray]) -> np.ndarray:
        blocks = np.concatenate(lanes)
        steps = np.concatenate([part["weights"] for part in found])
        move = np.sum([part["rest"] for part in found], axis=0)
        length = 1.0 if len(found) == 1 else self._best_length(problem, state, blocks, steps, move)
        state["shortest"] = np.minimum(state["shortest"], length)
        state["weights"][blocks] += length * steps
        state["rest"] += length * move
        change = np.concatenate([part["change"] for part in found])
        # A shortened step leaves something to do for all columns in it.
        return change if length == 1.0 else np.maximum(change, np.abs(steps) * np.sqrt(problem["squares"][blocks]))

    def survey_due(self, change: np.ndarray, peak: float, rounds: int, rounds_of_a_pass: int) -> bool:
        return bool(change.max(initial=0.0) <= _LEFT * peak) or rounds >= max(_MOST_ROUNDS, rounds_of_a_pass)

    def survey(self, problem: Arrays, state: Arrays, lane: int, lanes: int) -> Arrays:
        part = share(self.count(problem), lane, lanes)
        return {"gradients": problem["x"][:, part].T @ state["rest"]}

    def judge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays]) -> Verdict:
        gradients = np.concatenate([part["gradients"] for part in found])
        weights, rest, squares = state["weights"], state["rest"], problem["squares"]
        l1, l2 = self._penalties(problem)
        scale = squares + l2
        ahead = gradients + squares * weights
        best = np.sign(ahead) * np.maximum(np.abs(ahead) - l1, 0.0) / np.where(scale > 0, scale, 1.0)
        change = np.where(squares > 0, np.abs(best - weights), 0.0) * np.sqrt(squares)
        # Columns in use keep taking part: they change as soon as others do.
        change = np.where((weights != 0) & (change == 0), np.finfo(np.float64).tiny, change)
        rows = len(rest)
        objective = (0.5 * rest @ rest + l1 * np.abs(weights).sum() + 0.5 * l2 * weights @ weights) / rows
        at_zero = 0.5 * float(problem["y"] @ problem["y"]) / rows
        gap = self._gap(problem, state, gradients) / rows / at_zero if at_zero > 0 else 0.0
        return Verdict(
            objective=float(objective), gap=max(0.0, float(gap)), change=change,
            metrics={"nonzero": float(np.count_nonzero(weights))},
        )  # fmt: skip

    def result(self, problem: Arrays, state: Arrays) -> Arrays:
        weights = state["weights"]
        return {"coefficients": weights, "intercept": problem["mean"] - problem["means"] @ weights}

    def predict(self, result: Arrays, data: Any) -> np.ndarray:
        """X w + b."""
        x = Table.of(data, targets="none").x
        check_width(self.name, x, len(result["coefficients"]))
        return np.asarray(x @ result["coefficients"] + result["intercept"])

    def describe(self, result: Arrays, names: Sequence[str]) -> list[str]:
        """The largest coefficients."""
        weights = result["coefficients"]
        used = int(np.count_nonzero(weights))
        lines = [f"{used:,} of {len(weights):,} coefficients are not zero; the largest:"]
        for column in np.argsort(-np.abs(weights), kind="stable")[: min(_SHOWN, used)]:
            lines.append(f"{weights[column]:<12.6g} {names[column] if len(names) else column}")
        return lines

    def _penalties(self, problem: Arrays) -> tuple[float, float]:
        """For |r|^2 / 2, without the division by the number of rows."""
        rows = len(problem["y"])
        return self.alpha * self.l1_ratio * rows, self.alpha * (1 - self.l1_ratio) * rows

    def _gap(self, problem: Arrays, state: Arrays, gradients: np.ndarray) -> float:
        """The duality gap: at most this is the objective above its minimum.

        The dual point is the residual, scaled until it is feasible (S.-J. Kim et al., 2007).
        """
        weights, rest, y = state["weights"], state["rest"], problem["y"]
        l1, l2 = self._penalties(problem)
        steepest = float(np.abs(gradients - l2 * weights).max(initial=0.0))
        scale = l1 / steepest if steepest > l1 else 1.0
        fit, size = float(rest @ rest), float(weights @ weights)
        dual = scale * float(rest @ y) - 0.5 * scale**2 * (fit + l2 * size)
        return 0.5 * fit + l1 * float(np.abs(weights).sum()) + 0.5 * l2 * size - dual

    def _best_length(
        self, problem: Arrays, state: Arrays, blocks: np.ndarray, steps: np.ndarray, move: np.ndarray
    ) -> float:
        """The length from 0 to 1 of a step at which the objective is least: its slope grows, so it is halved in on."""
        l1, l2 = self._penalties(problem)
        weights, rest = state["weights"][blocks], state["rest"]
        linear = float(rest @ move) + l2 * float(weights @ steps)
        square = float(move @ move) + l2 * float(steps @ steps)

        def slope(length: float) -> float:
            ahead = weights + length * steps
            return linear + length * square + l1 * float(np.where(ahead != 0, np.sign(ahead), -np.sign(steps)) @ steps)

        # Near the optimum, slopes are the rounding errors of `rest`, which say nothing.
        if slope(1.0) <= np.finfo(np.float64).eps * float(rest @ rest):
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if slope(middle) <= 0 else (low, middle)
        return low


def _directions(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """These columns as rows of length 1, in single precision, and of a sample of many rows of x.

    Their products are the correlations, to 0.05 in a sample.
    """
    rows = np.asarray(x.T[columns, :: max(1, len(x) // _SAMPLED)], dtype=np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1))
