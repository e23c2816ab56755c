"""What a run was expected to take: predicted from earlier runs or its own first steps, kept, and compared with fact."""

from __future__ import annotations

import dataclasses

import pytest
from unit.observe.scripted_run import own_loop_plan, plan, progress, ready, started

from syncline.observe.report.record import record_of
from syncline.observe.report.report_page import content
from syncline.planning import profile_store
from syncline.planning.cost.network import HostRates
from syncline.planning.cost.profile import Fact
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.rates import rates_seen
from syncline.planning.expected import Expected, as_text, compare, read_expected
from syncline.planning.forecaster import Forecaster
from syncline.planning.machine import Machine
from syncline.strategies.method import ModelShapes
from syncline.strategies.reading import read_strategy
from syncline.telemetry.events import WorkerFailure, WorkerReady

MACHINE = Machine(host="here", cores=4, memory_available_bytes=10**10, no_shared_memory_because=None,
                  processor="x", python="3")  # fmt: skip
SHAPES = {"a": [100, 100], "b": [100]}


@pytest.fixture(autouse=True)
def _own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ready_with_shapes() -> WorkerReady:
    return WorkerReady(time=ready(0).time, worker_id=0, pid=1, parameters=10_100, collective="SharedMemory",
                       shapes=SHAPES, optimizer_slots=1)  # fmt: skip


def events(plan_, *, intervals: int = 8, steps: int = 10, forward: float = 0.02, waiting: float = 0.001):
    """Steps that take this long, reported by all workers."""
    phases = {"data": 0.001, "forward": forward, "backward": 0.03, "exchange": 0.002, "update": 0.001,
              "waiting": waiting}  # fmt: skip
    found = [started(plan_), ready_with_shapes(), *(ready(rank) for rank in range(1, plan_.size))]
    for number in range(1, intervals + 1):
        found += [
            progress(rank, step=steps * number, after_s=0.25 * number, bytes_sent=40_400 * steps,
                     phases={name: steps * seconds for name, seconds in phases.items()})
            for rank in range(plan_.size)
        ]  # fmt: skip
    return found


def forecast(plan_, found=None) -> tuple[Expected | None, list[Expected]]:
    """What was expected before the start, and what later."""
    forecaster = Forecaster(plan_, MACHINE)
    before = forecaster.before_start()
    later = [made for event in (found or events(plan_)) if (made := forecaster.on_event(event)) is not None]
    last = forecaster.at_end()
    return before, [*later, *([last] if last else [])]


def test_without_an_earlier_run_a_run_is_predicted_from_its_first_steps():
    before, (later,) = forecast(plan())
    assert before is None
    assert later.is_from_own_steps
    assert later.terms["forward"].mid == pytest.approx(0.02)
    assert later.terms["exchange"].mid != pytest.approx(0.002), "the exchange is predicted, not measured"
    assert later.bytes_per_step == 40_400


def test_a_run_like_an_earlier_one_is_predicted_before_it_starts():
    forecast(plan())
    before, later = forecast(plan(strategy="sparknet(10)", batch=256), events(plan(), forward=0.04))
    assert later == []
    assert not before.is_from_own_steps
    assert before.terms["forward"].mid == pytest.approx(0.04), "with twice the samples, twice as long"
    assert before.bytes_per_step == 4040
    assert "allreduce, 2 workers, 64 samples" in before.source


def test_what_is_kept_is_of_this_task_and_this_machine():
    forecast(plan())
    assert Forecaster(plan(fingerprint="other"), MACHINE).before_start() is None
    assert Forecaster(plan(), dataclasses.replace(MACHINE, host="there")).before_start() is None
    assert Forecaster(plan(batch=128 * 100), MACHINE).before_start() is None, "too many samples to tell from so few"


def test_the_exchange_of_another_model_is_predicted_from_what_an_earlier_run_exchanged():
    _, (first,) = forecast(plan())
    _, (later,) = forecast(plan(fingerprint="other"))
    assert later.is_from_own_steps
    assert later.terms["exchange"].mid == pytest.approx(0.002, rel=0.01)
    assert first.terms["exchange"].mid < 0.001


@pytest.mark.parametrize("disturb", [
    lambda found: [*found, WorkerFailure(worker_id=1, name="worker 1", cause="killed", step=9, workers=1,
                                         is_replaced=True)],
    lambda found: [started(plan(), resumed_from_step=7), *found[1:]],
    lambda found: found[:4],
])  # fmt: skip
def test_a_disturbed_or_short_run_is_not_kept(disturb):
    forecast(plan(), disturb(events(plan())))
    assert Forecaster(plan(), MACHINE).before_start() is None


def test_a_run_that_is_too_short_or_has_another_layout_says_why_it_was_not_predicted():
    _, (short,) = forecast(plan(), events(plan(), intervals=2))
    assert not short.is_prediction
    assert "too short" in short.source
    spread, _ = forecast(plan(layout="sharded"))
    assert "sharded" in spread.source
    assert compare(spread, Fact(terms={"forward": 1.0}, bytes_per_step=1, steps=100)) is None


def test_on_hosts_the_network_that_was_given_counts_and_otherwise_a_guess_is_named():
    workers = tuple(dataclasses.replace(w, host=f"host {w.rank}") for w in plan().workers)
    spread = dataclasses.replace(plan(), workers=workers)

    def expected(network: str | None) -> Expected:
        forecaster = Forecaster(spread, MACHINE, network)
        (made,) = [made for event in events(spread) if (made := forecaster.on_event(event)) is not None]
        return made

    assert "a guess" in expected(None).source
    slow = expected("1mbit,100ms")
    assert "1mbit,100ms" in slow.source
    assert slow.terms["exchange"].mid > 0.1 > expected(None).terms["exchange"].mid


def test_a_script_is_predicted_from_its_first_steps():
    script = own_loop_plan()
    found = [
        progress(rank, step=10 * number, after_s=number, phases={"compute": 0.5, "exchange": 0.01, "update": 0.1})
        for number in range(1, 8) for rank in (0, 1)
    ]  # fmt: skip
    _, (later,) = forecast(script, [started(script), ready_with_shapes(), ready(1), *found])
    assert later.terms["compute"].mid == pytest.approx(0.05)


def kept(compute_s: float, spread: float = 0.0) -> profile_store.Kept:
    forward = Range(compute_s * (1 - spread), compute_s, compute_s * (1 + spread))
    reader = Forecaster(plan(), MACHINE)
    for event in events(plan()):
        reader.on_event(event)
    profile = dataclasses.replace(reader._profile(), phases={"forward": forward})
    return profile_store.Kept(profile=profile, shapes=SHAPES, optimizer_slots=1)


def test_of_two_runs_the_faster_counts_unless_the_slower_is_seen_twice():
    old = kept(1.0)
    assert profile_store.settled(old, kept(0.8)).profile.compute_s.mid == 0.8
    doubted = profile_store.settled(old, kept(1.5))
    assert doubted.profile == old.profile
    assert profile_store.settled(doubted, kept(1.55)).profile.compute_s.mid == 1.55
    assert profile_store.settled(doubted, kept(2.5)).profile == old.profile, "two different slow runs agree on nothing"
    again = profile_store.settled(doubted, kept(1.0))
    assert again.doubt_s is None


def test_an_implausibly_fast_run_must_be_seen_twice():
    doubted = profile_store.settled(kept(1.0), kept(0.05))
    assert doubted.profile.compute_s.mid == 1.0
    assert profile_store.settled(doubted, kept(0.05)).profile.compute_s.mid == 0.05


def test_of_profiles_that_agree_the_steadier_is_kept():
    assert profile_store.settled(kept(1.0, 0.2), kept(1.02, 0.1)).profile.compute_s.mid == 1.02
    assert profile_store.settled(kept(1.0, 0.1), kept(1.02, 0.2)).profile.compute_s.mid == 1.0


def test_a_damaged_store_is_as_good_as_none():
    forecast(plan())
    profile_store.store_file().write_text('{"a": [1]}')
    assert Forecaster(plan(), MACHINE).before_start() is None
    profile_store.store_file().write_text("[")
    assert profile_store.look_up("a") == []


def test_rates_are_read_only_from_exchanges_that_show_them():
    profile = kept(1.0).profile
    profile = dataclasses.replace(profile, phases={**profile.phases, "exchange": Range.exactly(0.01)})
    for name, shows in (("allreduce", True), ("server-sync", True), ("sparknet(10)", False), ("onebit", False)):
        traffic = read_strategy(name).method.traffic(ModelShapes(10_100), 2)
        assert (rates_seen(HostRates(), profile, traffic) != HostRates()) == shows, name


EXPECTED = Expected(
    strategy="allreduce", layout="replicated", workers=2, batch=64, source="Predicted from a guess.",
    terms={"forward": Range(0.9, 1.0, 1.1), "exchange": Range(0.1, 0.2, 0.3), "waiting": Range(0.0, 0.1, 0.2)},
    bytes_per_step=100.0, memory_bytes=Range(90e6, 100e6, 110e6),
)  # fmt: skip


def test_terms_that_a_run_reports_as_one_are_compared_as_one():
    fact = Fact(terms={"forward": 0.8, "exchange": 0.6}, bytes_per_step=100.0, steps=50, memory_bytes=125_000_000)
    found = compare(EXPECTED, fact)
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["forward", "exchange", "step", "bytes/step", "memory"]
    assert rows["forward"].error == pytest.approx(0.25)
    assert rows["exchange"].predicted.mid == pytest.approx(0.3)
    assert rows["step"].error == pytest.approx(1.3 / 1.4 - 1)
    assert not rows["memory"].is_in_range
    assert "exchange, by 21%" in found.summary
    assert "+25%" in as_text(found)


def test_a_term_that_was_not_expected_is_shown_too():
    found = compare(EXPECTED, Fact(terms={"forward": 1.0, "waiting": 0.1, "data": 0.5}, bytes_per_step=0, steps=9))
    assert {row.name for row in found.terms} == {"forward", "exchange", "waiting", "data"}
    assert next(row for row in found.terms if row.name == "data").predicted.mid == 0
    assert next(row for row in found.terms if row.name == "exchange").error is None


def test_a_machine_that_was_used_by_something_else_is_told_from_a_wrong_prediction():
    terms = {name: Range.exactly(0.1) for name in ("data", "forward", "backward", "exchange")}
    made = dataclasses.replace(EXPECTED, terms=terms)

    def summary(**measured: float) -> str:
        return compare(made, Fact(terms={**dict.fromkeys(terms, 0.1), **measured}, bytes_per_step=1, steps=9)).summary

    assert "something else" in summary(data=0.2, forward=0.15, backward=0.3)
    assert "something else" not in summary(data=0.2, forward=0.1, backward=0.3, exchange=0.9)


def test_the_file_is_read_back_and_a_damaged_one_is_none(tmp_path):
    path = tmp_path / "expected.json"
    path.write_bytes(EXPECTED.to_json())
    assert read_expected(path) == EXPECTED
    for content_ in (b"{}", b"[", EXPECTED.to_json().replace(b"0.9", b"9.9")):
        path.write_bytes(content_)
        assert read_expected(path) is None
    assert read_expected(tmp_path / "none.json") is None


def test_the_report_shows_prediction_and_fact_of_the_last_session():
    found = events(plan())
    _, (made,) = forecast(plan(), found)
    record = record_of("a", found)
    assert "Prediction and fact" not in content([record])
    record.expected = made
    page = content([record])
    assert "Prediction and fact" in page
    assert "first steps of the run itself" in page
    assert {row.name for row in record.comparison.terms} == {
        "data", "forward", "backward", "exchange", "update", "waiting",
    }  # fmt: skip
    record.apply(started(plan(), resumed_from_step=80))
    assert record.comparison is None, "nothing is known of the new session yet"
