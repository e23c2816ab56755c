"""Several strategies and numbers of workers, simulated one after another, and their table. Pure.

Here: `study`, `Study` and its text. Not here: one run (`simulate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncline.errors import ConfigError
from syncline.planning.cost.network import Network
from syncline.planning.simulation.scenario import Scenario
from syncline.planning.simulation.simulate import Simulated, simulate
from syncline.strategies.method import ModelShapes, RunConditions, size
from syncline.strategies.reading import read_strategy

_HEAD: tuple[str, ...] = (
    "strategy", "workers", "samples/s", "goodput", "wasted", "waiting", "bytes/step", "staleness", "checkpoint",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a simulation needs to know of a model on a machine."""

    shapes: ModelShapes
    optimizer_slots: int
    compute_s: float
    """A worker's step, on its share of the samples."""
    network: Network
    """The link of each host, and the rates inside one."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """All results, and why some were not possible."""

    results: tuple[Simulated, ...]
    refused: dict[str, str]
    compute_s: float
    steps: int

    def to_dict(self) -> dict[str, Any]:
        found = [result.to_dict() for result in self.results]
        return {"steps": self.steps, "compute_s": self.compute_s, "results": found, "refused": self.refused}


def study(
    scenario: Scenario, counts: Sequence[int], strategies: Sequence[str], measured: Measured, *, per_host: int = 1
) -> Study:
    """Simulate each strategy with each number of workers."""
    results: list[Simulated] = []
    refused: dict[str, str] = {}
    for name in strategies:
        method = read_strategy(name).method
        for workers in counts:
            hosts = max(1, -(-workers // per_host))
            try:
                method.check_run(RunConditions(workers=workers, hosts=hosts))
            except ConfigError as error:
                refused[f"{name}, {workers} workers"] = str(error)
                continue
            made = replace(scenario, workers=workers, compute_s=measured.compute_s)
            network = replace(measured.network, hosts=hosts)
            found = simulate(made, name, method, measured.shapes, network, measured.optimizer_slots)
            if found is None:
                refused[name] = "it declares neither bytes_per_step nor traffic"
                break
            results.append(found)
    return Study(results=tuple(results), refused=refused, compute_s=measured.compute_s, steps=scenario.steps)


def table(made: Study) -> str:
    """All results as text."""
    rows = [_HEAD]
    rows += [_row(result) for result in made.results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in rows]  # fmt: skip
    lines += [
        "",
        f"{made.steps:,} steps; a worker computes {1e3 * made.compute_s:.3g} ms in each. waiting: part of the workers' "
        "time spent on waiting and exchanging. wasted: part of the run repeated, repaired or checkpointed. staleness: "
        "median and 95th percentile of the updates, or steps, that others are ahead. checkpoint: time between two.",
        *(f"{name}: not possible. {why}" for name, why in made.refused.items()),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _row(found: Simulated) -> tuple[str, ...]:
    stale = f"{found.staleness_at(0.5)}, {found.staleness_at(0.95)}" if found.staleness else "-"
    interval = found.checkpoint_interval_s
    return (
        found.strategy, f"{found.workers:,}", f"{found.throughput:,.0f}", f"{found.goodput:,.0f}",
        f"{100 * found.wasted:.1f}%", f"{100 * found.waited:.0f}%", size(found.bytes_per_step), stale,
        "-" if interval is None else f"{interval:,.0f} s",
    )  # fmt: skip
