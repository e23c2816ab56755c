"""K-means: what scikit-learn finds from the same start, whatever the lanes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans

import syncline
from syncline.errors import ConfigError, DataError


def rows(seed=0):
    random = np.random.default_rng(seed)
    return np.concatenate([random.normal(size=(50, 4)) + 100 * place for place in np.eye(5, 4)])


def fitted(tmp_path, x, **options):
    return syncline.fit("k-means(clusters=5)", data=x, out=tmp_path, quiet=True, tolerance=0.0, **options)


def test_the_centers_are_those_of_scikit_learn_from_the_same_start(tmp_path):
    x = rows()
    start = x[:5]
    theirs = KMeans(5, init=start, n_init=1, tol=0, algorithm="lloyd").fit(x)
    found = fitted(tmp_path, x, start={"centers": start})
    assert np.allclose(found["centers"], theirs.cluster_centers_)
    assert (found["labels"] == theirs.labels_).all()
    assert found.metrics["objective"] == pytest.approx(theirs.inertia_)
    assert (found.predict(x) == found["labels"]).all()


def test_any_lanes_find_the_same_and_the_start_spreads_the_centers(tmp_path):
    x = rows(1)
    one = fitted(tmp_path, x)
    many = fitted(tmp_path, x, schedule=syncline.Blocks(lanes=3))
    assert one["centers"].tobytes() == many["centers"].tobytes()
    assert sorted(np.bincount(one["labels"])) == [50] * 5
    assert "5 clusters of 50" in one.describe()[0]


def test_clusters_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(DataError) as few:
        fitted(tmp_path, rows()[:3])
    assert few.value.code == "too-few-rows"
    with pytest.raises(ConfigError) as none:
        syncline.fit("k-means(clusters=0)", data=rows(), out=tmp_path, quiet=True)
    assert none.value.facts["setting"] == "clusters"
    with pytest.raises(ConfigError) as order:
        fitted(tmp_path, rows(), schedule=syncline.Blocks(by="change"))
    assert order.value.facts["setting"] == "by"


def test_equal_rows_end_at_once(tmp_path):
    found = fitted(tmp_path, np.ones((10, 2)))
    assert found.metrics["objective"] == 0
    assert found.rounds == 0
