"""Fitting by blocks: Lasso beside scikit-learn, rounds by change beside random ones, and two workers beside one.

Here: a Lasso of 1,000 x 20,000 with a small penalty, each side with one thread, to the same relative duality gap; and
columns in correlated groups. Before anything is measured, the coefficients are checked to be those of scikit-learn to
1e-4. Not here: starting worker processes, whose seconds are not counted.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from syncline.blocks.fit_task import BlockFit
from syncline.blocks.loop import Alone, Fitting
from syncline.blocks.schedule import Blocks, By
from syncline.config.run import RunConfig
from syncline.errors import SynclineError
from syncline.fitting import Fitted, run_fit
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.telemetry.events import CheckpointSaved, Event, RunStarted, WorkerReady
from syncline.telemetry.run_dir import RunDir

Data = tuple[np.ndarray, np.ndarray]

_TOLERANCE = 1e-7
_EXACT = 1e-11
"""To compare coefficients."""
_MOST_DIFFERENCE = 1e-4
_SEEDS = 10
_GOAL_TIME, _GOAL_ROUNDS, _GOAL_WORKERS = 2.0, 0.5, 1.0


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Time beside scikit-learn, rounds, and workers."""
    rows, columns = (200, 2000) if settings.quick else (1000, 20_000)
    settings.say("Making data.")
    data = independent(rows, columns)
    with _one_thread():
        yield _lasso(data, _alpha(data, 0.05), "lasso", "a large penalty")
        yield _lasso(data, _alpha(data, 0.005), "lasso-dense", "a small penalty")
        yield _rounds(2 if settings.quick else _SEEDS)
        folder = Path(tempfile.mkdtemp(prefix="syncline-bench-"))
        try:
            tall = correlated(0, rows=4000 if settings.quick else 20_000)
            yield _workers(tall, _alpha(tall, 0.0005), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def independent(rows: int, columns: int) -> Data:
    """A hundred of many columns count."""
    random = np.random.default_rng(0)
    x = np.asfortranarray(random.normal(size=(rows, columns)))
    weights = np.zeros(columns)
    weights[random.choice(columns, 100, replace=False)] = 100 * random.random(100)
    return x, x @ weights + random.normal(size=rows)


def correlated(seed: int, rows: int = 500, columns: int = 2000, group: int = 40) -> Data:
    """Columns in groups whose members correlate by 0.9."""
    random = np.random.default_rng(seed)
    common = np.repeat(random.normal(size=(rows, columns // group)), group, axis=1)
    x = np.sqrt(0.9) * common + np.sqrt(0.1) * random.normal(size=(rows, columns))
    weights = np.zeros(columns)
    weights[random.choice(columns, 50, replace=False)] = 3 * random.normal(size=50)
    return x, x @ weights + random.normal(size=rows)


def rounds_to(data: Data, by: By, *, lanes: int = 64) -> int:
    """Rounds of 64 columns at once until the objective is 1.01 times the least one."""
    alpha = _alpha(data, 0.05)
    best = _run(BlockFit.make(f"lasso(alpha={alpha})", data, title="", workers=1, tolerance=1e-6)).objectives[-1][1]
    schedule = Blocks(lanes=lanes, size=1, by=by, apart=0.3 if by == "change" else 1.0)
    fitting = Fitting(BlockFit.make(f"lasso(alpha={alpha})", data, title="", workers=1, schedule=schedule))
    while True:
        fitting.step(Alone())
        rest, weights = fitting.state["rest"], fitting.state["weights"]
        if 0.5 * rest @ rest / len(rest) + alpha * np.abs(weights).sum() <= 1.01 * best:
            return fitting.round


def _lasso(data: Data, alpha: float, name: str, what: str) -> Suite:
    from sklearn.linear_model import Lasso

    x, y = data

    def theirs(tolerance: float = _TOLERANCE) -> np.ndarray:
        return np.asarray(Lasso(alpha=alpha, tol=tolerance, max_iter=10**6).fit(x, y).coef_)

    def ours(tolerance: float = _TOLERANCE) -> np.ndarray:
        folder = Path(tempfile.mkdtemp(prefix="syncline-bench-"))
        try:
            return _fit(data, alpha, tolerance, folder)["coefficients"]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    difference = float(np.abs(theirs(_EXACT) - ours(_EXACT)).max())
    if difference > _MOST_DIFFERENCE:
        raise SynclineError(f"The coefficients differ by {difference:g}.", code="wrong-coefficients")
    return Suite(
        name=name,
        measures=f"Lasso, {x.shape[0]:,} x {x.shape[1]:,}, {what}, to a relative gap of {_TOLERANCE:g}: seconds.",
        unit="s",
        baseline="scikit-learn",
        contenders=(
            Contender(name="scikit-learn", measure=_seconds(theirs), what="sklearn.linear_model.Lasso, one thread."),
            Contender(
                name="1 worker", measure=_seconds(ours), what="syncline.fit, one thread, with its run directory."
            ),
        ),
        goals=(Goal(contender="1 worker", limit=_GOAL_TIME),),
    )


def _rounds(seeds: int) -> Suite:
    @functools.cache  # the same in each measurement
    def measure(by: By) -> float:
        return float(np.mean([rounds_to(correlated(seed), by) for seed in range(seeds)]))

    return Suite(
        name="lasso-rounds",
        measures=f"Lasso with correlated columns, 64 at once: rounds to 1.01 times the optimum, mean of {seeds} seeds.",
        unit="rounds",
        baseline="random",
        contenders=(
            Contender(name="random", measure=functools.partial(measure, "random"), what='Blocks(by="random", apart=1)'),
            Contender(name="change", measure=functools.partial(measure, "change"), what='Blocks(apart=0.3)'),
        ),
        goals=(Goal(contender="change", limit=_GOAL_ROUNDS),),
    )  # fmt: skip


def _workers(data: Data, alpha: float, folder: Path) -> Suite:
    def measure(workers: int) -> float:
        found = _fit(data, alpha, _TOLERANCE, folder, workers=workers)
        events = list(RunDir(found.run_dir).read_events())
        begun = next(event.time for event in events if isinstance(event, RunStarted))
        started = [event.time for event in events if isinstance(event, WorkerReady)]
        ended = [event.time for event in events if isinstance(event, CheckpointSaved)][-1]
        shutil.rmtree(found.run_dir, ignore_errors=True)
        return ended - (started[0] if started else begun)

    return Suite(
        name="lasso-workers",
        measures=f"Lasso with correlated columns, {data[0].shape[0]:,} x {data[0].shape[1]:,}: seconds of rounds, "
        "without starting processes.",
        unit="s",
        baseline="1 worker",
        contenders=(
            Contender(name="1 worker", measure=functools.partial(measure, 1), what="One lane, one thread."),
            Contender(name="2 workers", measure=functools.partial(measure, 2), what="Two lanes, a thread each."),
        ),
        goals=(Goal(contender="2 workers", limit=_GOAL_WORKERS),),
    )


class _Silent:
    """A view that shows nothing."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


def _fit(
    data: Data, alpha: float, tolerance: float, out: Path, *, workers: int = 1, schedule: Blocks | None = None
) -> Fitted:
    config = RunConfig(workers=workers, threads=1, tune="off", out=str(out))
    return run_fit(f"lasso(alpha={alpha})", data, config, _Silent(), tolerance=tolerance, schedule=schedule)


def _run(what: BlockFit) -> Fitting:
    fitting = Fitting(what)
    while not ((status := fitting.step(Alone())) and status.has_converged):
        pass
    return fitting


def _alpha(data: Data, share: float) -> float:
    """A share of the least penalty that makes all coefficients zero."""
    x, y = data
    return share * float(np.abs((x - x.mean(axis=0)).T @ (y - y.mean())).max()) / len(y)


def _one_thread() -> AbstractContextManager[object]:
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    limits: AbstractContextManager[object] = threadpool_limits(1)
    return limits


def _seconds(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return measure
