"""`syncline.plan`: predict every strategy for a model on this machine, or on hosts like it, and say why.

Here: the function, and `measure_task`, for simulations. Not here: measuring (`measuring.py`) and predicting
(`planning/cost/`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline import boundary
from syncline.config.run import RunConfig
from syncline.driver import run_task
from syncline.errors import check_options
from syncline.measuring import Measuring, Question, Say, answer, hosts_asked, measure_coding
from syncline.planning.cost.choice import TrainingPlan
from syncline.planning.cost.network import DEFAULT_NETWORK, HostRates, Network, read_link
from syncline.planning.simulation.study import Measured
from syncline.strategies.reading import read_strategy
from syncline.task import Task

__all__ = ["plan"]


@boundary.guarding()
def plan(
    *,
    model: Any,
    data: Any,
    workers: int = 2,
    network: str | None = None,
    hosts: int | None = None,
    strategies: Sequence[str] | None = None,
    layouts: Sequence[str] = (),
    data_dir: str | Path | None = None,
    seconds: float = 3.0,
    target: float | None = None,
    probe_s: float = 60.0,
    say: Say | None = None,
    **settings: Any,
) -> TrainingPlan:
    """Predict how fast each strategy trains `model` on `data`, and why; the best comes first.

    The model is measured on this machine for about `seconds`, in short runs that leave nothing behind. With a
    `network`, such as "100mbit,1ms", each worker is on a host of its own with such a link, unless there are fewer
    `hosts`; they are taken to be like this machine.
    `layouts` are planned besides `replicated`, with the strategies that they fit: ["sharded"], or ["all"].
    With a `target` accuracy, a probe of at most `probe_s` shows how long it takes: `plan.seconds_to_target(strategy)`.
    `settings` are those of `RunConfig` and of `syncline.train`: batch, threads, optimizer, ...

    >>> plan = syncline.plan(model="lenet", data="mnist", workers=4, network="100mbit")   # doctest: +SKIP
    >>> print(plan.table()); plan.why("allreduce"); plan.best.strategy                   # doctest: +SKIP
    """
    parts = {f.name for f in dataclasses.fields(Task)} - {"model", "data"}
    names = [f.name for f in dataclasses.fields(RunConfig)]
    check_options("syncline.plan", settings, [*names, *parts], kind="setting")
    task = Task(model=model, data=data, **{k: v for k, v in settings.items() if k in parts})
    config = RunConfig(workers=workers, **{k: v for k, v in settings.items() if k not in parts})
    located = task.with_defaults().located(Path(data_dir) if data_dir else None, None)
    question = Question(
        task=located,
        config=config,
        hosts=hosts_asked(hosts, network, workers),
        network=network,
        seconds=seconds,
        layouts=tuple(layouts),
        target=target,
        probe_s=probe_s,
    )
    return answer(question, strategies, say or (lambda text: None), run_task)  # noqa: ARG005


def measure_task(question: Question, strategies: Sequence[str], say: Say, *, compute_s: float | None) -> Measured:
    """What a simulation needs; with `compute_s`, the time of a worker's step, nothing is run."""
    methods = {name: read_strategy(name).method for name in strategies}
    link = read_link(question.network or DEFAULT_NETWORK)
    measuring = Measuring(question, say, run_task)
    shapes, slots = measuring.shapes_and_slots()
    rates = HostRates(coding_s=measure_coding(methods, shapes, question.config.workers, say))
    if compute_s is None:
        profile = measuring.profile(shapes, slots)
        compute_s, rates = profile.compute_s.mid, measuring.rates(profile, methods, shapes)
    network = Network(link=link, cores=measuring.machine.cores, rates=rates)
    return Measured(shapes=shapes, optimizer_slots=slots, compute_s=compute_s, network=network)
