"""A profile is read off a run's events; what a plan says of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from syncline.errors import ConfigError, UnknownName
from syncline.planning.cost.choice import make_training_plan
from syncline.planning.cost.network import Network, read_link
from syncline.planning.cost.profile import Profile, profile_of
from syncline.planning.cost.step import Workload
from syncline.strategies.method import ModelShapes, RunConditions
from syncline.telemetry.events import Progress, RunStarted

PLAN = SimpleNamespace(batch=64, size=2, strategy="allreduce", workers=[SimpleNamespace(threads=1)])


def progress(worker_id: int, step: int, steps: int, **phases: float) -> Progress:
    """A report of so many steps, each of which took these times."""
    return Progress(worker_id=worker_id, epoch=0, step=step, samples=0, seconds=0.25, cursor=0,
                    phases={name: steps * seconds for name, seconds in phases.items()})  # fmt: skip


def events_of(times: list[float]) -> list:
    events = [RunStarted(run_dir="", plan={}, machine={}, time=100.0)]
    for worker in (0, 1):
        events.append(progress(worker, 5, 5, forward=9.0, backward=9.0))  # warms up
        for number, seconds in enumerate(times):
            events.append(progress(worker, 15 + 10 * number, 10, forward=seconds, backward=2 * seconds, waiting=0.001))
    return events


def test_a_profile_has_the_median_step_without_its_warm_up():
    profile = profile_of(events_of([0.010, 0.011, 0.012]), PLAN)
    assert profile.phases["forward"].mid == pytest.approx(0.011)
    assert profile.compute_s.mid == pytest.approx(0.033)
    assert profile.waiting_s.mid == pytest.approx(0.001)
    assert profile.share == 32
    assert profile.is_steady
    assert Profile.from_dict(profile.to_dict()) == profile


def test_a_disturbed_profile_is_not_steady_and_a_short_run_has_none():
    assert not profile_of(events_of([0.01, 0.01, 0.05, 0.09]), PLAN).is_steady
    assert profile_of(events_of([0.01]), PLAN) is None


def made_plan(hosts: int, network: str, compute_s: float = 0.05):
    profile = profile_of(events_of([compute_s / 3] * 4), PLAN)
    workload = Workload(
        profile=dataclasses.replace(profile, memory_bytes=400_000_000), shapes=ModelShapes(11_000_000),
        optimizer_slots=1, batch=128, workers=4,
    )  # fmt: skip
    return make_training_plan(
        workload, Network(link=read_link(network), hosts=hosts, cores=4), model="m", data="d",
        strategies=["allreduce", "server-sync", "sparknet(10)", "hogwild"],
        conditions=RunConditions(workers=4, hosts=hosts),
    )  # fmt: skip


def test_on_a_slow_network_the_exchange_is_named_and_rarer_exchanges_are_faster():
    slow = made_plan(4, "100mbit,1ms")
    assert slow.best.strategy == "allreduce"
    assert slow.fastest.strategy == "sparknet(10)"
    assert slow.predictions[0].part("exchange") > 0.9
    assert "of a step is the exchange" in slow.why("allreduce")
    assert "exchanges every 10 steps" in slow.why("sparknet(10)")
    ring_s = 4 * 3 * 1e-3 + (2 * 3 / 4 * 44e6 - 65536) / (100e6 / 8 * 1448 / 1514)
    assert slow.best.term("exchange").mid == pytest.approx(ring_s)


def test_strategies_that_are_not_possible_are_listed_with_the_reason():
    slow = made_plan(4, "100mbit,1ms")
    assert "hogwild" in slow.refused
    assert "hogwild: not possible." in slow.table()
    assert "hogwild" not in made_plan(1, "1gbit").refused
    with pytest.raises(UnknownName):
        slow.why("sparknet")


def test_the_table_marks_the_best_and_separates_what_trains_differently():
    lines = made_plan(1, "1gbit").table().splitlines()
    assert [line.split()[1] for line in lines if line.startswith(">")] == ["allreduce"]
    apart = next(number for number, line in enumerate(lines) if line.startswith("These train differently"))
    assert {line.split()[0] for line in lines[apart + 1 : apart + 3]} == {"sparknet(10)", "hogwild"}


def test_a_network_that_cannot_be_read_is_refused_with_an_example():
    for text in ("fast", "10", "1gbit,2gbit", "0mbit", ""):
        with pytest.raises(ConfigError) as raised:
            read_link(text)
        assert raised.value.code == "network"
