"""Layouts are read from text; what a run cannot have is refused with the nearest that it can."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigError, UnknownName
from syncline.layouts.grid import Grid
from syncline.layouts.layout import LAYOUTS, Layout, read_layout
from syncline.layouts.pipeline import Pipeline
from syncline.layouts.sharded import Sharded
from syncline.layouts.tensor import Tensor
from syncline.strategies.method import RunConditions
from syncline.strategies.reading import read_strategy

FITS = {"workers": 4, "hosts": 1, "shares_memory": True, "is_own_loop": False, "clip_norm": None}


@pytest.mark.parametrize(
    "text",
    [
        *("replicated", "sharded", "sharded(2)", "pipeline(2)", "pipeline(3, schedule=gpipe)", "tensor(2)"),
        "pipeline(2, cut=h.3+h.6, micro_batches=7)",
        "pipeline(2) x tensor(2) x sharded(2)",
    ],
)
def test_a_layout_prints_as_what_is_read_back(text):
    assert str(read_layout(f" {text} ")) == text
    assert read_layout(str(read_layout(text))) == read_layout(text)


def test_every_layout_has_a_default():
    assert [str(read_layout(name)) for name in LAYOUTS] == ["replicated", "pipeline(2)", "tensor(2)", "sharded"]


def test_products_are_made_of_objects_or_text_in_any_order():
    assert Pipeline(2) * Sharded(2) == read_layout("sharded(2) x pipeline(2)") == read_layout("sharded(2)*pipeline(2)")
    assert str(Sharded(2) * Tensor(2) * Pipeline(2)) == "pipeline(2) x tensor(2) x sharded(2)"


def test_what_is_no_layout_is_an_error_with_the_nearest():
    with pytest.raises(UnknownName) as caught:
        read_layout("shardet")
    assert caught.value.facts["nearest"] == ["sharded"]
    with pytest.raises(UnknownName) as caught:
        read_layout("pipeline(2, schedul=gpipe)")
    assert caught.value.facts["nearest"] == ["schedule"]
    with pytest.raises(UnknownName) as caught:
        read_layout("pipeline(2, schedule=gpip)")
    assert caught.value.facts["nearest"] == ["gpipe"]


@pytest.mark.parametrize(
    "text", ["sharded(1)", "sharded(two)", "replicated()", "pipeline(0)", "tensor(1)", "sharded(2) x sharded(2)"]
)
def test_arguments_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        read_layout(text)
    assert refused.value.facts["reason"] == "argument"


@pytest.mark.parametrize("layout", ["sharded", "pipeline(2)", "tensor(2)", "pipeline(2) x sharded(2)"])
@pytest.mark.parametrize(
    ("strategy", "changes", "reason"),
    [
        ("hogwild", {}, "strategy"),
        ("ltfb", {}, "strategy"),
        ("allreduce + int8", {}, "strategy"),
        ("hierarchy(inside_host=allreduce, across_hosts=sparknet)", {}, "strategy"),
        ("allreduce until epoch 1, then sparknet", {}, "strategy"),
        ("allreduce", {"hosts": 2, "hosts_of_workers": tuple("abab")}, "no-shared-memory"),
        ("allreduce", {"shares_memory": False}, "no-shared-memory"),
    ],
)
def test_a_layout_is_refused_with_a_reason_where_it_would_be_wrong(layout, strategy, changes, reason):
    method, run = read_strategy(strategy).method, RunConditions(**{**FITS, **changes})
    with pytest.raises(ConfigError) as caught:
        read_layout(layout).check(strategy, method, run)
    assert caught.value.facts["reason"] == reason
    assert caught.value.facts["nearest"] == "replicated"
    Layout().check(strategy, method, run)


@pytest.mark.parametrize("layout", ["sharded(2)", "pipeline(2)", "tensor(2)"])
def test_hosts_that_hold_whole_replicas_need_a_strategy_between_them_and_replacements(layout):
    def check(strategy: str, hosts: str, policy: str) -> str | None:
        places = {"hosts": len(set(hosts)), "hosts_of_workers": tuple(hosts), "on_worker_failure": policy}
        try:
            read_layout(layout).check(strategy, read_strategy(strategy).method, RunConditions(**{**FITS, **places}))
        except ConfigError as error:
            return str(error.facts["reason"])
        return None

    assert check("sparknet", "aabb", "replace-only") is None
    assert check("sparknet", "abab", "replace-only") == "no-shared-memory"
    assert check("allreduce", "aabb", "replace-only") == "hosts"
    assert check("sparknet", "aabb", "shrink-and-replace") == "hosts"


def test_the_number_of_workers_must_be_a_multiple_of_what_a_replica_takes():
    method = read_strategy("allreduce").method
    for text, workers, fix in [
        ("pipeline(2)", 3, "2 or 4"),
        ("pipeline(2) x tensor(2)", 6, "4 or 8"),
        ("sharded(3)", 2, "3"),
    ]:
        with pytest.raises(ConfigError, match=f"--workers {fix}") as caught:
            read_layout(text).check("allreduce", method, RunConditions(**{**FITS, "workers": workers}))
        assert caught.value.facts["reason"] == "workers"
    read_layout("sharded").check("allreduce", method, RunConditions(**{**FITS, "workers": 3}))


def test_a_layout_fits_an_all_reduce_on_one_host():
    method, layout = read_strategy("allreduce").method, read_layout("sharded")
    layout.check("allreduce", method, RunConditions(**FITS))  # type: ignore[arg-type]
    layout.check("allreduce", method, RunConditions(**{**FITS, "is_own_loop": True}))
    for other in ("sharded(2)", "pipeline(2)", "tensor(2)"):
        with pytest.raises(ConfigError) as refused:
            read_layout(other).check("allreduce", method, RunConditions(**{**FITS, "is_own_loop": True}))
        assert refused.value.facts["reason"] == "own-loop"
    layout.check("allreduce", method, RunConditions(**{**FITS, "workers": 1, "shares_memory": False}))


def test_workers_have_the_places_that_the_layout_says():
    assert read_layout("replicated").grid(4) == Grid(4, 1, 1, 1)
    assert read_layout("sharded").grid(4) == Grid(1, 4, 1, 1)
    assert read_layout("sharded(2)").grid(4) == Grid(2, 2, 1, 1)
    assert read_layout("pipeline(2)").grid(4) == Grid(2, 1, 2, 1)
    assert read_layout("pipeline(2) x sharded(2)").grid(4) == Grid(1, 2, 2, 1)
    assert read_layout("pipeline(2) x sharded").grid(6) == Grid(1, 3, 2, 1)
    assert read_layout("tensor(2)").grid(1) == Grid(1, 1, 1, 1)


def test_the_explanation_says_what_each_worker_holds():
    (line, failure) = read_layout("sharded").explain(4, 10_000_000, read_strategy("allreduce").method)
    assert "5.0 MB" in line
    assert "20.0 MB" in line
    assert "completes" in failure
    replicas, cut, bubble, *_ = read_layout("pipeline(2)").explain(4, 10_000_000, read_strategy("allreduce").method)
    assert "2 replicas" in replicas
    assert "10.0 MB" in cut
    assert "11%" in bubble
