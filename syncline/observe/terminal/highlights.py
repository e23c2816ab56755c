"""What the terminal views pick from a `RunState`: the metrics worth a chart, and the commands to suggest at the end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.observe.formatting import best_metric
from syncline.observe.history import History
from syncline.observe.state import RunState

_COUNTERS = ("epoch", "step")
"""Logged by scripts beside their results; a chart of them would be a straight line."""


@dataclass(frozen=True)
class Series:
    """A metric over the run, with the labels at both ends of its x-axis."""

    name: str
    values: Sequence[float]
    first: str
    last: str


def loss_series(state: RunState) -> Series | None:
    """The training loss; None if there are too few points to draw."""
    return _over_steps(state.loss_name, state.losses) if len(state.losses) >= 2 else None


def result_series(state: RunState) -> Series | None:
    """The most important result, an accuracy if there is one; None if there are too few points to draw."""
    if state.evaluations:
        name = best_metric(state.evaluations[-1].metrics)
        having = [e for e in state.evaluations if name in e.metrics]
        if name is None or len(having) < 2:
            return None
        values = [e.metrics[name] for e in having]
        return Series(name, values, f"epoch {having[0].epoch}", f"epoch {having[-1].epoch}")
    no_results = {state.loss_name, *_COUNTERS}
    name = best_metric(n for n, h in state.logged_histories.items() if n not in no_results and len(h) >= 2)
    return None if name is None else _over_steps(name, state.logged_histories[name])


def next_steps(state: RunState) -> list[tuple[str, str]]:
    """What to do after the run, as (command or option, purpose)."""
    summary, plan = state.summary, state.plan
    if summary is None:
        return []
    run = shlex.quote(summary.run_dir)
    if summary.stopped_early:
        return [(f"syncline resume {run}", "resume from here")]
    steps = []
    if not plan.is_own_loop and not plan.is_cut_short and summary.epochs >= 1:
        steps.append((f"syncline resume {run} --epochs {2 * round(summary.epochs)}", "train longer"))
    if state.cores > summary.workers and plan.kind not in ("fit", "graph"):
        steps.append((f"--workers {state.cores}", f"use all {state.cores} cores of this machine"))
    elif not plan.is_own_loop:
        steps.append(("syncline explain TASK", "dry run: show the plan without training"))
    steps.append((f"syncline report {run}", "write an HTML report"))
    return steps


def _over_steps(name: str, history: History) -> Series:
    points = history.points
    return Series(name, [v for _, v in points], f"step {points[0][0]:,}", f"step {points[-1][0]:,}")
