"""Alternating least squares: the least squares of each row, a falling objective, and ratings that make sense."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import syncline
from syncline.blocks.fit_task import BlockFit
from syncline.blocks.loop import Alone, Fitting
from syncline.blocks.ratings import Ratings
from syncline.compute.kernels import factors
from syncline.errors import DataError


def ratings(users=60, items=40, count=600, seed=0):
    random = np.random.default_rng(seed)
    pairs = random.choice(users * items, count, replace=False)
    truth = random.normal(size=(users, 3)) @ random.normal(size=(3, items))
    return pairs // items, pairs % items, np.clip(np.round(3 + truth.ravel()[pairs]), 1, 5)


def fitted(model, data, rounds=40, **options):
    what = BlockFit.make(model, data, title="", workers=1, max_rounds=rounds, tolerance=0, **options)
    fitting, found = Fitting(what), []
    while not fitting.is_at_limit or fitting.surveyed_at < fitting.round:
        if (status := fitting.step(Alone())) is not None:
            found.append(status.verdict.objective)
    return what.app.result(what.problem, fitting.state), found


def objective(data, result, regularization, alpha):
    """The objective of implicit feedback, from all pairs."""
    matrix = csr_matrix((data[2], data[:2])).toarray()
    x, y = result["user_factors"], result["item_factors"]
    confidence = np.where(matrix > 0, alpha * matrix, 1.0)
    error = float(np.sum(confidence * ((matrix > 0) - x @ y.T) ** 2))
    return error + regularization * float(np.sum(x**2) + np.sum(y**2))


def test_the_objective_is_that_of_implicit_feedback_and_falls():
    data = ratings()
    result, found = fitted("als(factors=4, regularization=0.1, alpha=2.0)", data)
    assert found[-1] == pytest.approx(objective(data, result, 0.1, 2.0), rel=1e-9)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(found[1:]))


def test_each_row_is_the_least_squares_solution_of_the_other_side():
    data = ratings()
    result, _ = fitted("als(factors=4, regularization=0.1, alpha=2.0)", data)
    matrix = csr_matrix((data[2], data[:2])).toarray()
    x = result["user_factors"]  # the items were last
    for item in range(5):
        confidence = np.where(matrix[:, item] > 0, 2.0 * matrix[:, item], 1.0)
        left = (x * confidence[:, None]).T @ x + 0.1 * np.eye(4)
        right = x.T @ (confidence * (matrix[:, item] > 0))
        assert np.allclose(result["item_factors"][item], np.linalg.solve(left, right), atol=1e-9)


def test_explicit_ratings_are_recovered():
    data = ratings()
    result, _ = fitted("als(factors=3, regularization=0.01, implicit=False)", data, rounds=100)
    app = BlockFit.make("als(factors=3)", data, title="", workers=1).app
    assert np.sqrt(np.mean((app.predict(result, data[:2]) - data[2]) ** 2)) < 0.5


def test_any_lanes_and_the_replacement_of_the_kernel_find_the_same(monkeypatch):
    data = ratings()
    one, _ = fitted("als(factors=4)", data)
    many, _ = fitted("als(factors=4)", data, schedule=syncline.Blocks(lanes=5))
    assert one["user_factors"].tobytes() == many["user_factors"].tobytes()
    monkeypatch.setattr(factors, "library", lambda group: None)
    plain, _ = fitted("als(factors=4)", data, rounds=10)
    compiled, _ = fitted("als(factors=4)", data, rounds=10)
    assert np.allclose(plain["item_factors"], compiled["item_factors"], atol=1e-8)


def test_ratings_come_as_arrays_as_a_matrix_and_as_a_file(tmp_path):
    users, items, values = ratings()
    expected, _ = fitted("als(factors=2)", (users, items, values))
    matrix, _ = fitted("als(factors=2)", csr_matrix((values, (users, items))))
    assert np.allclose(expected["user_factors"], matrix["user_factors"])
    rows = "".join(f"u{u},i{i},{v}\n" for u, i, v in zip(users, items, values, strict=True))
    (tmp_path / "r.csv").write_text("user,item,rating\n" + rows)
    found = syncline.fit("als(factors=2)", data=tmp_path / "r.csv", out=tmp_path, quiet=True)
    assert found.converged
    assert found.predict((["u1", "u2"], ["i3", "i4"])).shape == (2,)
    assert "60 users and 40 items" in found.describe()[0]
    again = syncline.fit("als(factors=2)", data=tmp_path / "r.csv", out=tmp_path, quiet=True, start=found)
    assert again.metrics["objective"] <= found.metrics["objective"] * (1 + 1e-9)
    with pytest.raises(DataError) as refused:
        found.predict((["nobody"], ["i3"]))
    assert refused.value.code == "unknown-rated"


def test_what_is_wrong_with_ratings_is_said(tmp_path):
    users, items, values = ratings()
    negative, hole = values.copy(), values.copy()
    negative[5], hole[7] = -1, np.nan
    wrong = {
        "negative-rating": (users, items, negative), "nan-in-data": (users, items, hole),
        "rating-lengths": (users, items, values[:-1]), "no-ratings": ([], [], []), "not-ratings": values,
        "repeated-rating": ([1, 1], [2, 2], [3.0, 4.0]), "not-numbers": ([1], [2], ["good"]),
    }  # fmt: skip
    for code, data in wrong.items():
        with pytest.raises(DataError) as refused:
            syncline.fit("als", data=data, out=tmp_path, quiet=True)
        assert refused.value.code == code
    assert len(Ratings.of((users, items, negative)).values) == 600  # as explicit feedback they are fine
    (tmp_path / "r.csv").write_text("user,item\n1,2\n")
    with pytest.raises(DataError) as refused:
        syncline.fit("als", data=tmp_path / "r.csv", out=tmp_path, quiet=True)
    assert refused.value.code == "rating-columns"
