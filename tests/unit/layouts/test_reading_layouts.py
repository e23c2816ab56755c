"""Layouts are read from text; what a run cannot have is refused with the nearest that it can."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigError, UnknownName
from syncline.layouts.layout import LAYOUTS, Layout, Sharded, read_layout
from syncline.strategies.method import RunConditions
from syncline.strategies.reading import read_strategy

FITS = {"workers": 2, "hosts": 1, "shares_memory": True, "is_own_loop": False, "clip_norm": None}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_prints_as_what_is_read_back(name):
    assert str(read_layout(f" {name} ")) == name


def test_what_is_no_layout_is_an_error_with_the_nearest():
    with pytest.raises(UnknownName) as caught:
        read_layout("shardet")
    assert caught.value.facts["nearest"] == ["sharded"]
    for text in ("sharded(2)", "replicated()"):
        with pytest.raises(ConfigError) as refused:
            read_layout(text)
        assert refused.value.facts["reason"] == "argument"


@pytest.mark.parametrize(
    ("strategy", "changes", "reason"),
    [
        ("sparknet", {}, "strategy"),
        ("hogwild", {}, "strategy"),
        ("allreduce + int8", {}, "strategy"),
        ("hierarchy(inside_host=allreduce, across_hosts=sparknet)", {}, "strategy"),
        ("allreduce until epoch 1, then sparknet", {}, "strategy"),
        ("allreduce", {"hosts": 2}, "no-shared-memory"),
        ("allreduce", {"shares_memory": False}, "no-shared-memory"),
    ],
)
def test_sharding_is_refused_with_a_reason_where_it_would_be_wrong(strategy, changes, reason):
    method, run = read_strategy(strategy).method, RunConditions(**{**FITS, **changes})
    with pytest.raises(ConfigError) as caught:
        Sharded().check(strategy, method, run)
    assert caught.value.facts["reason"] == reason
    assert caught.value.facts["nearest"] == "replicated"
    Layout().check(strategy, method, run)


def test_sharding_fits_an_all_reduce_on_one_host_without_a_memory_limit():
    method = read_strategy("allreduce").method
    Sharded().check("allreduce", method, RunConditions(**FITS))  # type: ignore[arg-type]
    Sharded().check("allreduce", method, RunConditions(**{**FITS, "is_own_loop": True}))
    Sharded().check("allreduce", method, RunConditions(**{**FITS, "workers": 1, "shares_memory": False}))
    with pytest.raises(ConfigError) as caught:
        Sharded().check("allreduce", method, RunConditions(**FITS), has_memory_limit=True)  # type: ignore[arg-type]
    assert caught.value.facts["reason"] == "memory-limit"


def test_the_explanation_says_what_each_worker_holds():
    (line, failure) = Sharded().explain(4, 10_000_000)
    assert "5.0 MB" in line
    assert "20.0 MB" in line
    assert "completes" in failure
