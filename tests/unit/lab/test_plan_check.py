"""`syncline plan --check`: the errors of predictions, which part of the grid is run, and the model that sleeps."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.lab.plan_check.cells import QUICK, Grid
from syncline.lab.plan_check.command import grid_of, read_results
from syncline.lab.plan_check.paced import MakePaced
from syncline.lab.plan_check.table import Checked, as_data, detail_of, errors_of, kendall, lines_of, merged


def checked(strategy: str, predicted: float, measured: float, model: str = "lenet", **more) -> Checked:
    given_ = {
        "model": model, "place": "2 workers, 1 host", "strategy": strategy, "predicted_ms": predicted,
        "low_ms": 0.9 * predicted, "high_ms": 1.1 * predicted, "measured_ms": measured, "predicted_bytes": 100.0,
        "measured_bytes": 100.0, "predicted_mb": 200.0, "measured_mb": 210.0, **more,
    }  # fmt: skip
    return Checked(**given_)


ROWS = [checked("a", 10, 10), checked("b", 20, 21), checked("c", 30, 15), checked("d", 40, 50)]


def test_errors_are_relative_to_what_was_measured():
    errors = errors_of(ROWS)
    assert errors.count == 4
    assert errors.median == pytest.approx((0.2 + 1 / 21) / 2)
    assert errors.p95 == pytest.approx(1.0)
    assert errors.in_range == 0.5
    assert errors.bytes == 0
    assert errors.memory == pytest.approx(10 / 210)
    assert errors.tau == pytest.approx(4 / 6)
    assert errors.chosen == 1.0


def test_a_wrong_choice_counts_by_what_it_costs():
    wrong = [checked("a", 10, 12), checked("b", 11, 10), checked("c", 30, 30)]
    assert errors_of(wrong).chosen == 0.0
    nearly = [checked("a", 10, 10.4), checked("b", 11, 10), checked("c", 30, 30)]
    assert errors_of(nearly).chosen == 1.0
    both = [*wrong, *(dataclasses.replace(one, model="resnet18") for one in nearly)]
    assert errors_of(both).chosen == 0.5


def test_bytes_count_only_where_a_short_run_can_show_them():
    rare = [checked("a", 1, 1, measured_bytes=None), checked("b", 1, 1, measured_bytes=80.0)]
    assert errors_of(rare).bytes == pytest.approx(0.25)
    assert errors_of(rare[:1]).bytes is None
    assert errors_of(rare).tau is None, "two cannot be ranked"


@given(st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True))
def test_the_rank_correlation_is_one_for_the_same_order_and_minus_one_for_its_reverse(values):
    assert kendall(values, [2 * value + 1 for value in values]) == 1
    assert kendall(values, [-value for value in values]) == -1


def test_portions_add_up_and_what_is_measured_again_is_replaced(tmp_path):
    again = dataclasses.replace(ROWS[0], measured_ms=11.0)
    both = merged(ROWS, [again, checked("e", 1, 1)])
    assert len(both) == 5
    assert next(one for one in both if one.strategy == "a").measured_ms == 11.0
    path = tmp_path / "out.json"
    assert read_results(path) == []
    path.write_text(json.dumps({"runs": as_data(both)}))
    assert read_results(path) == both
    path.write_text('{"runs": [{"model": 1}]}')
    with pytest.raises(ConfigError) as raised:
        read_results(path)
    assert raised.value.code == "damaged-results"


def test_the_table_has_a_line_for_each_cell_and_one_for_all():
    both = [*ROWS, checked("a", 1, 1, model="resnet18")]
    lines = lines_of(both)
    assert len(lines) == 2 + 2 + 1
    assert lines[-1].startswith("| **all** |  | 5 |")
    assert len({line.count("|") for line in lines}) == 1
    assert len(detail_of(both)) == 2 + 5


def test_the_grid_is_the_whole_one_or_the_part_that_was_asked_for():
    nothing = {"quick": False, "model": None, "workers": None, "network": None, "strategies": None}
    assert grid_of(**nothing) == Grid()
    assert grid_of(**{**nothing, "quick": True}) == QUICK
    part = grid_of(**{**nothing, "model": "lenet", "workers": 4, "network": "100mbit", "strategies": ["ssp"]})
    assert (part.models, len(part.places), part.strategies) == (("lenet",), 1, ("ssp",))
    assert [p.rate for p in grid_of(**{**nothing, "workers": 4, "network": "none"}).places] == [None]
    with pytest.raises(ConfigError):
        grid_of(**{**nothing, "model": "linear"})
    with pytest.raises(ConfigError) as raised:
        grid_of(**{**nothing, "workers": 3})
    assert raised.value.code == "no-place"


def test_a_paced_model_has_the_parameters_and_takes_the_time_that_it_was_told():
    model = MakePaced({"a.weight": (3, 4), "a.bias": (3,)}, 0.02, 0.05)()
    assert sum(p.numel() for p in model.parameters()) == 15
    began = time.monotonic()
    output = model(torch.zeros(6, 2))
    between = time.monotonic()
    output.sum().backward()
    ended = time.monotonic()
    assert output.shape == (6, 2)
    assert between - began >= 0.02
    assert ended - between >= 0.05
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
