"""Lasso and elastic net: the optimum of scikit-learn, in few rounds, whatever the lanes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import ElasticNet, Lasso

import syncline
from syncline.blocks.fit_task import BlockFit
from syncline.blocks.loop import Alone, Fitting
from syncline.compute.kernels import descent
from syncline.errors import ConfigError, DataError


def correlated(seed, rows=200, columns=400, group=20):
    """Columns in groups that correlate by 0.9."""
    random = np.random.default_rng(seed)
    common = np.repeat(random.normal(size=(rows, columns // group)), group, axis=1)
    x = np.sqrt(0.9) * common + np.sqrt(0.1) * random.normal(size=(rows, columns)) + 3.0
    weights = np.zeros(columns)
    weights[random.choice(columns, 12, replace=False)] = random.normal(size=12) * 3
    return x, x @ weights + random.normal(size=rows)


def penalty(x, y, share=0.05):
    return share * float(np.abs((x - x.mean(axis=0)).T @ (y - y.mean())).max()) / len(y)


def fitted(model, data, **options):
    what = BlockFit.make(model, data, title="data", workers=1, **{"tolerance": 1e-9, **options})
    fitting = Fitting(what)
    while not ((status := fitting.step(Alone())) and status.has_converged):
        assert not fitting.is_at_limit
    return what.app.result(what.problem, fitting.state), status, fitting


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_coefficients_are_those_of_scikit_learn(ratio, intercept):
    x, y = correlated(1)
    alpha = penalty(x, y)
    theirs = ElasticNet(alpha=alpha, l1_ratio=ratio, fit_intercept=intercept, tol=1e-10, max_iter=10**6).fit(x, y)
    model = f"elastic-net(alpha={alpha}, l1_ratio={ratio}, intercept={intercept})"
    # Without an intercept, all columns correlate, because their mean is not 0.
    many = [syncline.Blocks(lanes=8, size=1, apart=0.3)] if intercept else []
    for schedule in (None, syncline.Blocks(lanes=3), *many):
        found, status, _ = fitted(model, (x, y), schedule=schedule)
        assert np.abs(found["coefficients"] - theirs.coef_).max() < 1e-4
        assert abs(found["intercept"] - theirs.intercept_) < 1e-3
        assert status.verdict.gap <= 1e-9


def test_lasso_is_the_elastic_net_with_nothing_but_its_first_penalty():
    x, y = correlated(2)
    alpha = penalty(x, y)
    found, _, _ = fitted(f"lasso(alpha={alpha})", (x, y))
    theirs = Lasso(alpha=alpha, tol=1e-10, max_iter=10**6).fit(x, y)
    assert np.abs(found["coefficients"] - theirs.coef_).max() < 1e-4


def rounds_to(best, what):
    """Rounds until the objective is 1.01 times the best."""
    fitting = Fitting(what)
    while True:
        fitting.step(Alone())
        rest, weights = fitting.state["rest"], fitting.state["weights"]
        if 0.5 * rest @ rest / len(rest) + what.app.alpha * np.abs(weights).sum() <= 1.01 * best:
            return fitting.round


def test_blocks_by_change_need_half_of_the_rounds_of_random_ones_when_columns_correlate():
    for seed in range(10):
        x, y = correlated(seed, rows=150, columns=800, group=20)
        alpha = penalty(x, y)
        best = fitted(f"lasso(alpha={alpha})", (x, y))[1].verdict.objective
        needed = {}
        for by in ("change", "random"):
            apart = {"change": 0.3, "random": 1.0}[by]
            schedule = syncline.Blocks(lanes=32, size=1, by=by, apart=apart)
            needed[by] = rounds_to(
                best, BlockFit.make(f"lasso(alpha={alpha})", (x, y), title="", workers=1, schedule=schedule)
            )
        assert needed["change"] <= 0.5 * needed["random"], (seed, needed)


def test_the_objective_never_grows_when_related_columns_are_updated_at_once():
    x, y = correlated(3)
    what = BlockFit.make(
        f"lasso(alpha={penalty(x, y, 0.01)})", (x, y), title="", workers=1,
        schedule=syncline.Blocks(lanes=20, size=1, by="random", apart=1.0, staleness=2),
    )  # fmt: skip
    fitting, last = Fitting(what), np.inf
    for _ in range(200):
        fitting.step(Alone())
        rest, weights = fitting.state["rest"], fitting.state["weights"]
        objective = 0.5 * rest @ rest / len(rest) + what.app.alpha * np.abs(weights).sum()
        assert objective <= last * (1 + 1e-12)
        last = objective


def test_the_kernel_and_its_replacement_find_the_same(monkeypatch):
    x, y = correlated(4)
    model = f"elastic-net(alpha={penalty(x, y)})"
    ours, _, _ = fitted(model, (x, y))
    monkeypatch.setattr(descent, "library", lambda group: None)
    plain, _, _ = fitted(model, (x, y))
    assert np.abs(ours["coefficients"] - plain["coefficients"]).max() < 1e-9


def test_constant_columns_and_constant_targets_are_no_problem():
    x, y = correlated(5)
    x[:, 7] = 5.0
    found, _, _ = fitted(f"lasso(alpha={penalty(x, y)})", (x, y))
    assert found["coefficients"][7] == 0
    found, status, _ = fitted("lasso(alpha=0.1)", (x, np.full(len(x), 2.0)))
    assert not found["coefficients"].any()
    assert found["intercept"] == 2.0
    assert status.round == 0


def test_an_earlier_result_is_a_start(tmp_path):
    x, y = correlated(6)
    model = f"lasso(alpha={penalty(x, y)})"
    first = syncline.fit(model, data=(x, y), out=tmp_path, quiet=True)
    assert first.converged
    assert first.rounds > 0
    for start in (first, first.run_dir, dict(first.values)):
        again = syncline.fit(model, data=(x, y), out=tmp_path, quiet=True, start=start)
        assert again.rounds == 0
    assert np.allclose(again.predict(x), x @ first["coefficients"] + first["intercept"])


def test_what_is_wrong_with_data_is_said(tmp_path):
    x, y = correlated(7)
    hole = x.copy()
    hole[3, 5] = np.nan
    wrong = {
        "nan-in-data": ((hole, y), {"row": 3, "column": 5}), "target-shape": ((x, y[:-1]), {"rows": 200}),
        "no-target": (x, {}), "not-a-matrix": ((x[:0], y[:0]), {}), "not-numbers": ((x.astype(str), y), {}),
    }  # fmt: skip
    for code, (data, facts) in wrong.items():
        with pytest.raises(DataError) as refused:
            syncline.fit("lasso", data=data, out=tmp_path, quiet=True)
        assert refused.value.code == code
        assert facts.items() <= refused.value.facts.items()
    for code, options in {
        "another-start": {"start": {"coefficients": np.zeros(3)}}, "unknown-option": {"epochs": 3},
        "invalid-setting": {"tolerance": -1}, "target-of-arrays": {"target": "y"},
        "not-a-result": {"start": tmp_path / "none.npz"},
    }.items():  # fmt: skip
        with pytest.raises(ConfigError) as told:
            syncline.fit("lasso", data=(x, y), out=tmp_path, quiet=True, **options)
        assert told.value.code == code
    with pytest.raises(DataError) as refused:
        syncline.fit("lasso", data=(x, y), out=tmp_path, quiet=True).predict(x[:, :4])
    assert refused.value.code == "another-shape"
