"""What a layout needs is counted, and `auto` chooses by memory first and by time second."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from syncline.errors import ConfigError
from syncline.layouts.choice import candidates, choose, look_at, refuse
from syncline.layouts.cut import UnitCost
from syncline.layouts.forecast import PROGRAM_BYTES, Need, check_layers, forecast
from syncline.layouts.layout import read_layout
from syncline.layouts.model_facts import DividedFacts, ModelFacts

MB = 1_000_000
LAYERS = 8


def deep_model(*, layer: int = 10 * MB, milliseconds: float = 1.0, **changes: object) -> ModelFacts:
    """Eight equal layers, Adam, 0.1 MB of activations per layer and sample."""
    units = tuple(
        UnitCost(
            name=f"layer{n}", forward_s=milliseconds / 3e3, backward_s=milliseconds / 1.5e3, samples=1, sent_bytes=1e4,
            returned_bytes=1e4, saved_bytes=1e5, parameters={f"layer{n}.weight": layer},
        )
        for n in range(LAYERS)
    )  # fmt: skip
    divided: Mapping[int, DividedFacts | str] = {2: "no layer is large enough", 4: "no layer is large enough"}
    facts = ModelFacts(
        parameters={f"layer{n}.weight": layer for n in range(LAYERS)}, largest_layer=layer, units=units, divided=divided
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def need(layout: str, facts: ModelFacts, workers: int, *, batch: int = 8, limit: int | None = None) -> Need:
    return forecast(read_layout(layout), facts, workers=workers, batch=batch, limit=limit).largest


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_a_shard_holds_its_part_of_the_state_and_the_largest_layer(shards):
    facts = deep_model()
    whole = need("replicated", facts, 1).state
    assert whole == 4 * facts.parameter_bytes
    part = need("sharded", facts, shards).state
    assert whole / shards < part <= whole / shards + facts.largest_layer + 0.1 * whole


def test_stages_hold_their_own_layers_and_the_first_ones_more_micro_batches():
    found = forecast(read_layout("pipeline(4)"), deep_model(), workers=4, batch=32)
    assert [n.parameters for n in found.needs] == [20 * MB] * 4
    assert [n.optimizer for n in found.needs] == [40 * MB] * 4
    assert [n.activations for n in found.needs] == pytest.approx([n * 0.4 * MB for n in (4, 3, 2, 1)], rel=0.06)
    assert found.bubble == pytest.approx(3 / 19, abs=0.01)


def test_the_workers_of_a_replica_together_hold_its_parameters_and_optimizer_state_once():
    facts = deep_model()
    for layout in ("sharded", "pipeline(4)", "pipeline(2) x sharded(2)"):
        found = forecast(read_layout(layout), facts, workers=4, batch=32)
        times = found.grid.workers // found.grid.stages
        assert times * sum(n.parameters for n in found.needs) == facts.parameter_bytes, layout
        assert times * sum(n.optimizer for n in found.needs) == 2 * facts.parameter_bytes, layout


def test_while_it_starts_each_worker_holds_the_whole_model():
    facts = deep_model(optimizer_state=0.0)
    found = need("sharded", facts, 8)
    assert found.start >= facts.parameter_bytes > found.state
    assert found.total == PROGRAM_BYTES + found.start


def test_a_limit_is_met_with_more_micro_batches():
    facts = deep_model(layer=MB)
    free = need("sharded", facts, 2, batch=256)
    limit = free.total - 50 * MB
    found = forecast(read_layout("sharded"), facts, workers=2, batch=256, limit=limit)
    assert found.fits(limit)
    assert found.is_finer
    with_batch_norm = dataclasses.replace(facts, has_batch_norm=True)  # smaller pieces would change its statistics
    assert not forecast(read_layout("sharded"), with_batch_norm, workers=2, batch=256, limit=limit).fits(limit)


def test_what_does_not_fit_is_refused_with_figures_and_the_nearest_that_does():
    facts = deep_model()
    limit = PROGRAM_BYTES + 250 * MB
    looked = look_at(candidates(2), facts, workers=2, batch=4, limit=limit)
    predicted = forecast(read_layout("replicated"), facts, workers=2, batch=4, limit=limit)
    assert not predicted.fits(limit)
    error = refuse(predicted, looked, limit)
    assert error.code == "memory-limit"
    assert error.facts["needed_bytes"] == predicted.largest.total > limit
    assert error.facts["nearest"] == "sharded"
    assert error.facts["nearest_bytes"] <= limit
    hopeless = refuse(predicted, look_at(candidates(2), facts, workers=2, batch=4, limit=1), 1)
    assert hopeless.facts["nearest"] is None


def test_auto_chooses_the_quickest_that_fits_and_the_simplest_of_equals():
    free = choose(look_at(candidates(4), deep_model(layer=MB // 10), workers=4, batch=32), limit=None)
    assert str(free.layout) == "replicated"
    facts, limit = deep_model(), PROGRAM_BYTES + 250 * MB
    tight = choose(look_at(candidates(4), facts, workers=4, batch=32, limit=limit), limit=limit)
    assert not tight.layout.is_replicated
    assert tight.chosen.fits(limit)
    fitting = [c.forecast for c in tight.candidates if c.forecast is not None and c.forecast.fits(limit)]
    assert tight.chosen.step_s <= 1.05 * min(one.step_s for one in fitting)
    lines = "\n".join(tight.describe())
    assert f"chose {tight.layout}" in lines
    assert "tensor(2): not possible, no layer is large enough" in lines
    assert "bubble" in lines


def test_auto_refuses_if_no_layout_fits_a_worker_or_the_machine():
    facts = deep_model()
    with pytest.raises(ConfigError) as refused:
        choose(look_at(candidates(2), facts, workers=2, batch=4, limit=MB), limit=MB)
    assert (refused.value.code, refused.value.facts["nearest"]) == ("memory-limit", None)
    with pytest.raises(ConfigError) as refused:
        choose(look_at(candidates(2), facts, workers=2, batch=4), limit=None, host_bytes=MB)
    assert refused.value.facts["reason"] == "host-memory"


@pytest.mark.parametrize(
    ("layout", "workers", "changes", "reason", "nearest"),
    [
        ("pipeline(9)", 9, {}, "too-many-stages", "pipeline(3)"),
        ("pipeline(11)", 11, {}, "too-many-stages", "sharded"),
        ("pipeline(2)", 2, {"uncut_because": "it loops"}, "untraceable", "sharded"),
        ("tensor(2)", 2, {}, "nothing-to-divide", "sharded"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused_with_the_nearest_layout(
    layout, workers, changes, reason, nearest
):
    with pytest.raises(ConfigError) as refused:
        check_layers(read_layout(layout), deep_model(**changes), workers)
    assert (refused.value.code, refused.value.facts["reason"]) == ("layout", reason)
    assert refused.value.facts["nearest"] == nearest
    assert read_layout(refused.value.facts["nearest"]).grid(workers).workers == workers
