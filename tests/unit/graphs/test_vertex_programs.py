"""What a vertex program sees and may do, and what it is refused."""

from __future__ import annotations

import numpy as np
import pytest

import syncline
from syncline.errors import ConfigError, DataError, UnknownName

TRIANGLE = syncline.Graph(edges=[(0, 1), (1, 2), (2, 0)], nodes={"x": [1.0, 2.0, 3.0]}, edge_fields={"w": [1, 2, 4.0]})


def one_round(update, graph=TRIANGLE, **settings):
    program = syncline.vertex_program(**{"consistency": "vertex", **settings})(update)
    return syncline.graph.run(program, graph, max_rounds=1).values.tolist()


def test_a_program_gathers_fields_of_both_ends_and_of_the_edge():
    assert one_round(lambda v: v.gather("in", lambda e: e.source.x)) == [3, 1, 2]
    assert one_round(lambda v: v.gather("out", lambda e: e.target.x)) == [2, 3, 1]
    assert one_round(lambda v: v.gather("in", lambda e: e.w * e.source.x)) == [12, 1, 4]
    assert one_round(lambda v: v.gather("in", lambda e: np.where(e.source.x > e.target.x, e.w, 0))) == [4, 0, 0]
    assert one_round(lambda v: v.x + v.gather("in", lambda e: 1.0) + v.out_degree) == [3, 4, 5]
    assert one_round(lambda v: v.gather("in", lambda e: e.neighbor.number, reduce="max")) == [2, 0, 1]


def test_a_program_is_called_once_a_round_not_once_a_vertex():
    calls = []

    def update(v):
        calls.append(len(v))
        return v.gather("in", lambda e: e.source.value) + 1.0

    program = syncline.vertex_program(consistency="vertex", until=0)(update)
    syncline.graph.run(program, syncline.Graph(edges=np.stack([np.arange(9999), np.arange(1, 10000)])), max_rounds=3)
    assert calls == [10000] * 3


def test_reductions_agree_with_python():
    rng = np.random.default_rng(0)
    graph = syncline.Graph(rng.integers(0, 30, (2, 150)), size=40)
    values = rng.integers(-1, 6, 40)
    around = [values[graph.sources[graph.targets == v]].tolist() for v in range(40)]

    def mode(seen, own):
        most = [value for value in set(seen) if seen.count(value) == max(map(seen.count, seen))]
        return own if not seen or own in most else max(most)

    expected = {
        "sum": [sum(seen) for seen in around],
        "any": [any(seen) for seen in around],
        "all": [all(seen) for seen in around],
        "mode": [mode(seen, own) for seen, own in zip(around, values.tolist(), strict=True)],
        "mex": [next(k for k in range(99) if k not in seen) for seen in around],
        "h_index": [max(h for h in range(99) if sum(s >= h for s in seen) >= h) for seen in around],
    }
    for name, result in expected.items():
        found = one_round(lambda v, name=name: v.gather("in", lambda e: e.source.value, name), graph, initial=values)
        assert found == result, name
    filled = [v for v in range(40) if around[v]]
    for name, function in {"min": min, "max": max}.items():
        found = one_round(lambda v, name=name: v.gather("in", lambda e: e.source.value, name), graph, initial=values)
        assert [found[v] for v in filled] == [function(around[v]) for v in filled]


def test_scattered_fields_are_set_after_the_values_and_seen_in_the_next_round():
    def update(v):
        v.scatter("out", m=lambda e: e.source.value * 10 + e.target.value)
        return v.number + 1.0 + v.gather("in", lambda e: e.m)

    program = syncline.vertex_program(consistency="vertex", edges={"m": 0.0})(update)
    assert syncline.graph.run(program, TRIANGLE, max_rounds=1).values.tolist() == [1, 2, 3]
    assert syncline.graph.run(program, TRIANGLE, max_rounds=2).values.tolist() == [1 + 31, 2 + 12, 3 + 23]


def test_aggregates_are_those_of_all_values_before_the_round():
    program = syncline.vertex_program(initial=1.0, aggregates={"total": np.sum}, consistency="vertex")(
        lambda v: v.value + v.aggregates["total"]
    )
    assert syncline.graph.run(program, TRIANGLE, max_rounds=2).values.tolist() == [16, 16, 16]
    with pytest.raises(ConfigError) as caught:
        syncline.graph.run(program, TRIANGLE, schedule="fifo")
    assert caught.value.code == "aggregates-and-schedule"


def test_random_numbers_depend_on_seed_round_and_vertex_only():
    program = syncline.vertex_program(initial=0.0, until=0)(lambda v: v.random(1)[:, 0])
    drawn = [
        syncline.graph.run(program, TRIANGLE, max_rounds=1, consistency=c, seed=s).values.tolist()
        for c, s in (("vertex", 0), ("edge", 0), ("full", 0), ("edge", 1))
    ]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    big = syncline.Graph(edges=[(0, 1)], size=20000)
    sample = syncline.graph.run(program, big, max_rounds=1).values
    assert abs(sample.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 0.03


def test_priority_stays_right_if_a_gather_is_not_what_it_seems():
    """It depends on the round, so that kept sums become wrong: this must be noticed."""

    def update(v):
        damping = 0.3 if v.round < 2 else 0.5
        return 1.0 + v.gather("in", lambda e: damping * e.source.value)

    program = syncline.vertex_program(schedule="priority", consistency="vertex", until=1e-12)(update)
    assert np.allclose(syncline.graph.run(program, TRIANGLE).values, 2.0, atol=1e-9)


@pytest.mark.parametrize(
    ("update", "error", "code"),
    [
        (lambda v: v.gather("in", lambda e: e.source.y), UnknownName, "unknown-name"),
        (lambda v: v.gather("both", lambda e: e.source.x), UnknownName, "unknown-name"),
        (lambda v: v.gather("in", lambda e: e.source.x, reduce="median"), UnknownName, "unknown-name"),
        (lambda v: v.nothing, UnknownName, "unknown-name"),
        (lambda v: np.ones(2), ConfigError, "program-shape"),
        (lambda v: v.x * np.nan, DataError, "nan-value"),
        (lambda v: v.gather("in", lambda e: np.ones(7)), ConfigError, "not-an-expression"),
        (lambda v: v.scatter("out", m=lambda e: 1.0), UnknownName, "unknown-name"),
    ],
)
def test_a_program_that_is_wrong_is_told_why(update, error, code):
    with pytest.raises(error) as caught:
        one_round(update)
    assert caught.value.code == code


def test_settings_that_are_wrong_are_refused():
    for name, value, code in (
        ("schedule", "fifoo", "unknown-name"),
        ("consistency", "edges", "unknown-name"),
        ("until", -1, "invalid-setting"),
    ):
        with pytest.raises(ConfigError) as caught:
            syncline.vertex_program(**{name: value})(lambda v: v.value)
        assert caught.value.code == code
    for options, code in (
        ({"workers": 4}, "invalid-setting"),
        ({"workers": 2, "partition": "metiss"}, "unknown-name"),
        ({"worker": 2}, "unknown-option"),
        ({"initial": [1.0]}, "field-length"),
        ({"colors": [0, 0, 0]}, "improper-colors"),
        ({"schedule": "chromatic", "consistency": "vertex"}, "schedule-and-consistency"),
        ({"max_rounds": 0}, "invalid-setting"),
    ):
        with pytest.raises(ConfigError) as caught:
            syncline.graph.run(lambda v: v.value, TRIANGLE, **options)
        assert caught.value.code == code


def test_a_program_cannot_change_values_in_place():
    def update(v):
        v.value[0] = 1.0
        return v.value

    with pytest.raises(ValueError, match="read-only"):
        one_round(update)
