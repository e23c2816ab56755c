"""From a strategy's declarations to a simulated run, and what came of it.

Here: `simulate` and `Simulated`. Not here: the passing of time (`pace.py`), failures (`outages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from syncline.planning.cost.exchange import coding_s, exchange_s, server_s
from syncline.planning.cost.network import Network
from syncline.planning.simulation.outages import run_outages
from syncline.planning.simulation.pace import Rules, run_pace
from syncline.planning.simulation.scenario import Scenario
from syncline.strategies.method import Method, ModelShapes
from syncline.strategies.traffic import Traffic

_STRENGTH = {"all": 3, "bound": 2, "peers": 1, "nobody": 0}


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came of a simulated run."""

    strategy: str
    workers: int
    seconds: float
    throughput: float
    """Samples per second while nothing fails."""
    goodput: float
    """Samples per second over all, counting each sample once."""
    wasted: float
    """The part of the time that did not advance the run: repeated work, repairs, restarts and checkpoints."""
    waited: float
    """The part of the workers' time in which they waited for others, or exchanged."""
    failures: int
    bytes_per_step: float
    """That a worker sends."""
    checkpoint_interval_s: float | None
    staleness: Mapping[int, int]

    def staleness_at(self, fraction: float) -> int | None:
        """The staleness that this part of all updates does not exceed."""
        total, seen = sum(self.staleness.values()), 0
        for value, count in self.staleness.items():
            seen += count
            if seen >= fraction * total:
                return value
        return None

    def to_dict(self) -> dict[str, Any]:
        quantiles = {f"p{round(100 * q)}": self.staleness_at(q) for q in (0.5, 0.95, 1.0)}
        return {**asdict(self), "staleness": {str(k): v for k, v in self.staleness.items()}, **(
            {"staleness_quantiles": quantiles} if self.staleness else {}
        )}  # fmt: skip


def simulate(
    scenario: Scenario, strategy: str, method: Method, shapes: ModelShapes, network: Network, optimizer_slots: int = 0
) -> Simulated | None:
    """Simulate a run; None if the method does not declare what it sends."""
    method = method.on_hosts(network.hosts, scenario.workers)
    traffic = method.traffic(shapes, scenario.workers, optimizer_slots)
    if traffic is None:
        return None
    rules = rules_of(traffic, scenario.workers, shapes.numel, network)
    pace = run_pace(scenario, rules)
    outages = run_outages(scenario, rules, pace)
    samples = scenario.share * scenario.workers * scenario.steps
    return Simulated(
        strategy=strategy,
        workers=scenario.workers,
        seconds=outages.seconds,
        throughput=samples / pace.seconds,
        goodput=samples / outages.seconds,
        wasted=max(0.0, 1 - pace.seconds / outages.seconds),
        waited=pace.waited,
        failures=outages.failures,
        bytes_per_step=sum(each.bytes_per_step for each in traffic),
        checkpoint_interval_s=outages.interval_s,
        staleness=pace.staleness,
    )


def rules_of(traffic: tuple[Traffic, ...], workers: int, numbers: int, network: Network) -> Rules:
    """The exchange that waits for most decides how workers meet; the others only take time."""
    if not traffic:
        return Rules(waits="nobody")
    main = max(traffic, key=lambda each: (_STRENGTH[each.waits], -each.every))
    seconds = {id(t): exchange_s(t, workers, network).mid + coding_s(t, workers, numbers, network.rates).mid
               for t in traffic}  # fmt: skip
    others = sum(seconds[id(each)] / each.every for each in traffic if each is not main)
    service = 0.0
    if main.pattern == "servers" and main.waits != "all":
        both = (main.sent_bytes + main.received_bytes) / main.shards
        service = server_s(main, 1, network.rates).mid
        if not network.is_one_host:
            service = max(service, both / network.link.bytes_per_s)
    own = 0.0 if main.is_hidden else seconds[id(main)]
    return Rules(
        waits=main.waits, every=main.every, bound=main.bound, exchange_s=own, service_s=service, each_step_s=others,
    )  # fmt: skip
