"""What decides how a run computes: the search over choices, whatever the measurements are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.compute.tuning import (
    CHOICES,
    PASSES,
    Algorithms,
    TunedLayers,
    Tuning,
    TuningResult,
    describe_results,
    fastest,
    losses_agree,
    search,
    with_layers,
    with_loaders,
)
from syncline.config.run import RunConfig
from syncline.errors import ConfigError
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, make_plan

seconds = st.floats(1e-4, 10.0)
MACHINE = Machine(
    host="here", cores=8, memory_available_bytes=2**33, no_shared_memory_because=None, processor="x", python="3"
)


class Stopwatch:
    """Times that depend on the tuning alone; remembers what was tried out."""

    def __init__(
        self, *, channels_last: float = 1.0, bf16: float = 1.0, threads: dict[int, float] | None = None
    ) -> None:
        self.factors = {"channels-last": channels_last, "bf16": bf16}
        self.threads = threads or {}
        self.tried: list[Tuning] = []

    def __call__(self, tunable_convolutions: Sequence[Tuning]) -> list[float]:
        self.tried += tunable_convolutions
        return [
            self.factors.get(t.memory_format, 1.0)
            * self.factors.get(t.precision, 1.0)
            * self.threads.get(t.threads or 4, 1.0)
            for t in tunable_convolutions
        ]


def find(measure: Stopwatch, choices=CHOICES, *, has_images=True, threads=4, objection="") -> tuple[Tuning, tuple]:
    return search(
        Tuning(), choices, measure, has_images=has_images, threads=threads, check_bf16=lambda _tuning: objection
    )


@given(st.lists(seconds, min_size=1, max_size=6))
def test_the_usual_way_stays_unless_another_one_is_clearly_faster(times):
    chosen = fastest(times)
    assert times[chosen] == min(times) or chosen == 0
    if chosen != 0:
        assert times[chosen] * 1.05 <= times[0]
    else:
        assert all(t * 1.05 > times[0] for t in times[1:])


@given(seconds, seconds, seconds, seconds)
def test_what_is_found_is_never_slower_than_what_is_usual(a, b, c, d):
    watch = Stopwatch(channels_last=a, bf16=b, threads={1: c, 2: d})
    found, results = find(watch)
    assert watch([found])[0] <= watch([Tuning()])[0]
    assert math.prod(f.speed for f in results if f.is_taken) == pytest.approx(watch([Tuning()])[0] / watch([found])[0])


def test_only_what_is_left_open_is_tried_out():
    watch = Stopwatch(channels_last=0.1, bf16=0.1, threads={1: 0.1})
    assert find(watch, ()) == (Tuning(), ())
    assert watch.tried == []
    found, _ = find(watch, ("memory-format",))
    assert found == Tuning(memory_format="channels-last")
    assert find(Stopwatch(channels_last=0.1), ("memory-format",), has_images=False) == (Tuning(), ())
    assert find(Stopwatch(threads={1: 0.1}), ("threads",), threads=1) == (Tuning(), ())


def test_a_choice_is_tried_out_with_what_was_best_before():
    watch = Stopwatch(channels_last=0.5, bf16=0.5, threads={2: 0.5})
    found, results = find(watch)
    assert found == Tuning(memory_format="channels-last", precision="bf16", threads=2)
    assert [f.other for f in results] == ["channels-last memory", "bf16", "2 threads"]
    assert replace(found, precision="float32", threads=None) in watch.tried


def test_what_does_not_work_is_not_taken_and_said_so():
    found, (result,) = find(Stopwatch(channels_last=math.inf), ("memory-format",))
    assert found == Tuning()
    assert (result.speed, result.is_taken) == (0, False)
    assert "channels-last memory does not work" in result.describe()


def test_an_objection_keeps_the_default():
    found, (result,) = find(Stopwatch(bf16=0.5), ("precision",), objection="the loss diverges")
    assert found == Tuning()
    assert result.because == "the loss diverges"
    assert result.because in result.describe()


def test_results_are_described_in_one_line():
    taken = TuningResult(
        choice="memory-format", usual="contiguous memory", other="channels-last memory", speed=1.93, is_taken=True
    )
    slow = TuningResult(choice="precision", usual="float32", other="bf16", speed=0.1, is_taken=False)
    line = describe_results([taken, slow], 0.84)
    assert "\n" not in line
    for fact in ("0.8 s", "channels-last memory, 1.9 times", "float32", "bf16 is 0.1 times"):
        assert fact in line
    assert "cached" in describe_results([taken], 0.0)


@given(seconds, seconds, st.integers(1, 16))
def test_loaders_keep_a_step_from_waiting_as_far_as_there_are_cores(fetch_s, step_s, cores):
    tuning, results = with_loaders(Tuning(), fetch_s, step_s, cores)
    number = tuning.loaders or 1
    assert number <= cores
    assert fetch_s / number <= step_s * (1 + 1e-9) or number == cores
    assert (number == 1) == (results == ())
    assert all(f.speed >= 1 for f in results)


layer_seconds = st.one_of(st.just(math.inf), st.floats(1e-6, 1.0))


passes_by_algorithm = [(which, algorithm) for which, algorithms in PASSES for algorithm in algorithms]
pass_times = st.fixed_dictionaries(dict.fromkeys(passes_by_algorithm, layer_seconds))


@given(st.dictionaries(st.text(max_size=3), pass_times, max_size=5))
def test_convolutions_change_algorithm_where_that_saves_time_and_only_there(times):
    tuned = with_layers(Tuning(), times)
    for name, of_layer in times.items():
        chosen = tuned.tuning.layers.get(name, Algorithms())
        for which, algorithms in PASSES:
            taken, usual = of_layer[which, chosen.of(which)], of_layer[which, "torch"]
            assert taken == usual or taken * 1.05 <= usual
            if name in tuned.tuning.layers and chosen.of(which) == "torch":
                assert all(of_layer[which, algorithm] * 1.05 > usual for algorithm in algorithms)
        best = sum(min(of_layer[which, algorithm] for algorithm in algorithms) for which, algorithms in PASSES)
        if name not in tuned.tuning.layers:
            usual = sum(of_layer[which, "torch"] for which, _ in PASSES)
            assert usual == best == math.inf or math.isnan(usual - best) or usual - best < 1e-4 + 0.05 * usual
    assert bool(tuned.tuning.layers) == bool(tuned.results)
    assert all(f.is_taken and f.speed >= 1.04 for f in tuned.results)


def test_results_about_convolutions_are_counted_by_algorithm():
    times = dict.fromkeys(passes_by_algorithm, 0.3)
    tuned = with_layers(
        Tuning(),
        {
            "a": {**times, ("forward", "compiled"): 0.1, ("input", "compiled"): 0.2, ("weight", "matrices"): 0.1},
            "b": {**times, ("weight", "compiled"): 0.15, ("weight", "matrices"): 0.2},
            "c": times,
        },
    )
    assert tuned.tuning.layers == {
        "a": Algorithms(forward="compiled", input="compiled", weight="matrices"),
        "b": Algorithms(weight="compiled"),
    }
    assert [result.other for result in tuned.results] == [
        "3 passes of layers by compiled code",
        "1 pass of layers by matrices",
    ]
    assert [result.speed for result in tuned.results] == pytest.approx([2, 3])
    assert tuned.layer_s == pytest.approx({"a": 0.4, "b": 0.75, "c": 0.9})


COMPILED = {"a": Algorithms(forward="compiled")}


def find_form(
    *, plain=1.0, tuned=1.0, last=1.0, last_equipped=1.0, layer_s=None, choices=("memory-format", "convolutions")
) -> tuple[Tuning, tuple]:
    """Steps take so long in contiguous memory, in channels-last memory, and in each with compiled convolutions."""
    times = {
        ("contiguous", False): plain, ("contiguous", True): tuned,
        ("channels-last", False): last, ("channels-last", True): last_equipped,
    }  # fmt: skip
    found = TuningResult(choice="convolutions", usual="u", other="compiled", speed=2.0, is_taken=True)

    def tune_layers(tuning: Tuning) -> TunedLayers:
        seconds = {} if layer_s is None else {"a": layer_s[tuning.memory_format]}
        return TunedLayers(tuning=replace(tuning, layers=COMPILED), results=(found,), layer_s=seconds)

    return search(
        Tuning(), choices, lambda tried: [times[t.memory_format, bool(t.layers)] for t in tried],
        has_images=True, threads=1, check_bf16=lambda _tuning: "", tune_layers=tune_layers,
    )  # fmt: skip


@given(seconds, seconds, seconds, seconds)
def test_the_form_that_is_found_is_never_slower_than_what_is_usual(plain, tuned, last, last_equipped):
    tuning, results = find_form(plain=plain, tuned=tuned, last=last, last_equipped=last_equipped)
    taken = {
        ("contiguous", False): plain, ("contiguous", True): tuned, ("channels-last", True): last_equipped,
    }[tuning.memory_format, bool(tuning.layers)]  # fmt: skip
    assert taken <= min(plain, tuned)
    assert taken <= last_equipped * 1.05
    assert bool(tuning.layers) == any(f.choice == "convolutions" for f in results)


def test_convolutions_are_left_alone_where_they_are_not_to_be_tried_out():
    tuning, _ = find_form(tuned=0.1, last_equipped=0.1, choices=("memory-format",))
    assert tuning == Tuning()


def test_a_model_that_works_in_a_format_but_not_with_other_convolutions_takes_the_format():
    tuning, (result,) = find_form(tuned=math.inf, last=0.5, last_equipped=math.inf)
    assert tuning == Tuning(memory_format="channels-last")
    assert result.speed == 2


def test_with_few_samples_the_layers_have_a_say_in_the_format_if_it_works():
    slower_in_steps = {"last_equipped": 1.5, "layer_s": {"contiguous": 0.6, "channels-last": 0.1}}
    tuning, (result, _) = find_form(**slower_in_steps)
    assert tuning == Tuning(memory_format="channels-last", layers=COMPILED)
    assert result.speed == pytest.approx(2), "6 times as fast by the layers, 1.5 times as slow by the steps"
    assert find_form(last_equipped=0.9, layer_s={"contiguous": 0.1, "channels-last": 0.2})[0] == Tuning()
    assert find_form(**{**slower_in_steps, "last_equipped": math.inf})[0].memory_format == "contiguous"
    not_measured = {"contiguous": 0.4, "channels-last": math.inf}
    assert find_form(last_equipped=0.5, layer_s=not_measured)[0].memory_format == "channels-last"


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.floats(-0.04, 0.04))
def test_losses_that_are_nearly_the_same_agree(losses, off):
    assert losses_agree(losses, [loss * (1 + off) for loss in losses])
    assert not losses_agree(losses, [loss * 1.1 for loss in losses])
    assert not losses_agree(losses, [math.nan, *losses[1:]])


def plan(kind="train", samples=100_000, **config) -> Plan:
    facts = TaskFacts(kind=kind, model="m", data="d", fingerprint="f", train_samples=samples)
    return make_plan(facts, RunConfig(**config), MACHINE)


def test_the_plan_leaves_open_what_the_user_has_not_decided():
    assert plan().measured == ("memory-format", "convolutions", "threads", "loaders")
    assert plan(precision="auto").measured == (
        "memory-format", "convolutions", "threads", "loaders", "precision",
    )  # fmt: skip
    fixed = plan(memory_format="channels-last", threads=2, loaders=0, precision="bf16")
    assert (fixed.measured, fixed.memory_format, fixed.precision) == ((), "channels-last", "bf16")
    assert plan(tune="off").measured == ()
    assert plan(tune="off", precision="auto").measured == ("precision",), "asked for by name"


def test_a_short_run_is_left_as_it_is():
    assert plan(samples=1000, batch=100, epochs=1).measured == ()
    assert plan(samples=1000, batch=100, epochs=10).measured != ()
    assert plan(max_steps=99).measured == ()


def test_the_plan_says_what_will_be_measured_and_what_is_decided():
    assert "memory format, convolutions, threads, loaders" in plan().describe()
    fixed = plan(precision="bf16", memory_format="channels-last", tune="off").describe()
    assert "bf16 and channels-last memory" in fixed


def test_a_script_is_tuned_where_only_rounding_changes_and_the_rest_is_up_to_it():
    assert plan(kind="own-loop").measured == ("memory-format", "convolutions", "threads")
    assert plan(kind="own-loop", tune="off").measured == ()
    for settings in ({"precision": "bf16"}, {"precision": "auto"}, {"memory_format": "channels-last"}):
        with pytest.raises(ConfigError, match="script") as caught:
            plan(kind="own-loop", **settings)
        assert caught.value.code == "set-in-script"


def test_a_tuning_survives_being_written_down():
    tuning = Tuning(
        memory_format="channels-last",
        precision="bf16",
        threads=3,
        loaders=2,
        layers={"b.0": Algorithms(weight="matrices")},
    )
    assert Tuning.from_dict(tuning.to_dict()) == tuning
    assert Plan.from_dict(plan().to_dict()) == plan()
    before = {**Tuning(threads=3).to_dict(), "convolutions": ["a"]}
    assert Tuning.from_dict(before) == Tuning(threads=3), "as checkpoints had it when there was one other way"
