"""`auto(adapt)`: which strategy is advised in the middle of a run, and when."""

from __future__ import annotations

import dataclasses

import pytest
from unit.observe.scripted_run import plan, progress, ready
from unit.planning.test_expected import MACHINE

from syncline.planning.adviser import Adviser
from syncline.planning.plan import Plan
from syncline.strategies.presets import PRESETS
from syncline.telemetry.events import WorkerReady

PARAMETERS = 430_000
NAMES = [preset.name for preset in PRESETS.values() if preset.name not in ("hogwild", "h2o")]


def on_hosts(workers: int = 4, strategy: str = "allreduce", steps: int = 100_000) -> Plan:
    made = plan(workers, strategy=strategy, collective="process-group", total_steps=steps)
    hosts = tuple(dataclasses.replace(worker, host=f"host {worker.rank}") for worker in made.workers)
    return dataclasses.replace(made, workers=hosts)


class Run:
    """A run whose steps take these times."""

    def __init__(self, made: Plan, network: str = "100mbit,100us") -> None:
        self.adviser = Adviser(made, MACHINE, NAMES, network)
        self.workers, self.step = made.size, 0
        self.adviser.on_event(WorkerReady(worker_id=0, pid=1, parameters=PARAMETERS, collective="",
                                          shapes={"w": [PARAMETERS]}, optimizer_slots=1))  # fmt: skip
        for rank in range(1, made.size):
            self.adviser.on_event(ready(rank))

    def take(self, steps: int, *, exchange: float, compute: float = 0.02, slow: float = 1.0):
        """The first advice; worker 0 computes `slow` times as long as the others, which wait for it."""
        for _ in range(steps):
            self.step += 1
            for rank in range(self.workers):
                own = compute * (slow if rank == 0 else 1.0)
                late = compute * slow - own
                phases = {"forward": own / 3, "backward": 2 * own / 3, "exchange": exchange + late, "update": 0.0001}
                event = progress(rank, step=self.step, after_s=self.step, phases=phases)
                if (advice := self.adviser.on_event(event)) is not None:
                    return advice
        return None


RING_S = 2 * 3 / 4 * 4 * PARAMETERS / (100e6 / 8 * 1448 / 1514)


def test_while_all_goes_as_predicted_only_a_much_better_strategy_is_advised():
    run = Run(on_hosts(strategy="sparknet"))
    assert run.take(200, exchange=RING_S / 10) is None


def test_where_the_network_is_the_limit_rarer_exchanges_are_advised():
    advice = Run(on_hosts()).take(200, exchange=RING_S)
    assert advice is not None
    assert PRESETS[advice.strategy.replace("-", "_")].make().method.steps > 1
    assert "allreduce" in advice.text
    assert advice.strategy in advice.text


def test_a_network_that_becomes_slower_changes_the_advice():
    fast = "10gbit,10us"
    quick = RING_S / 100
    run = Run(on_hosts(), fast)
    assert run.take(300, exchange=quick) is None
    assert run.take(300, exchange=40 * quick) is not None


def test_where_one_worker_is_slow_nobody_should_wait_for_it():
    run = Run(on_hosts(workers=8), "10gbit,10us")
    assert run.take(100, exchange=0.001) is None
    advice = run.take(300, exchange=0.001, slow=8.0)
    assert advice is not None
    method = PRESETS[advice.strategy.replace("-", "_")].make().method
    assert method.is_asynchronous


def test_advice_needs_several_looks_and_enough_time_left():
    assert Run(on_hosts()).take(23, exchange=RING_S) is None, "a moment is not enough"
    assert Run(on_hosts(steps=110)).take(109, exchange=RING_S) is None, "switching would take as long as it saves"


@pytest.mark.parametrize("shapes", [{}])
def test_before_the_model_is_known_nothing_is_advised(shapes):
    adviser = Adviser(on_hosts(), MACHINE, NAMES)
    found = [
        adviser.on_event(progress(rank, step=step, after_s=step)) for step in range(1, 60) for rank in range(4)
    ]  # fmt: skip
    assert found == [None] * len(found)
