"""Scripted runs: the events of runs that never happened, for driving views. Times are those of a clock we set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from syncline.planning.plan import Plan, WorkerPlan
from syncline.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    MetricsLogged,
    Progress,
    RunStarted,
    Summary,
    WorkerReady,
)

START = 1_000_000.0
RUN_DIR = "runs/lenet-mnist-1"
PHASES = {"data": 0.004, "forward": 0.07, "backward": 0.11, "exchange": 0.04, "update": 0.02}
OWN_PHASES = {"data": 0.01, "compute": 0.16, "exchange": 0.05, "update": 0.02}


def plan(workers: int = 2, **changes: Any) -> Plan:
    made = Plan(
        kind="train",
        model="lenet",
        data="mnist",
        strategy="allreduce",
        workers=tuple(WorkerPlan(rank=r, host="here", device="cpu", threads=1) for r in range(workers)),
        collective="shared-memory",
        seed=0,
        epochs=3,
        batch=128,
        train_samples=60_000,
        test_samples=10_000,
        steps_per_epoch=469,
        total_steps=1407,
        accumulate=1,
        loaders=None,
        evaluate_every=1,
        checkpoint_every_s=30.0,
        checkpoint_every_steps=None,
        keep_checkpoints=3,
        on_nan="stop",
        batch_norm="global",
        shared_memory_bytes=10**9,
        exchange_timeout_s=300.0,
        fingerprint="0",
    )
    return replace(made, **changes)


def own_loop_plan(workers: int = 2, **changes: Any) -> Plan:
    unknown = {"train_samples": 0, "test_samples": 0, "steps_per_epoch": 0, "total_steps": 0}
    return plan(workers, **{"kind": "own-loop", "model": "my_loop.py", "data": "my_loop.py", **unknown, **changes})


def started(plan_: Plan, *, resumed_from_step: int | None = None, cores: int = 4, run_dir: str = RUN_DIR) -> RunStarted:
    return RunStarted(
        time=START,
        run_dir=run_dir,
        plan=plan_.to_dict(),
        machine={"cores": cores, "host": "here"},
        resumed_from_step=resumed_from_step,
    )


def ready(rank: int, time: float = START + 2) -> WorkerReady:
    return WorkerReady(time=time, worker_id=rank, pid=100 + rank, parameters=61_706, collective="SharedMemory")


def progress(
    rank: int = 0, *, step: int, after_s: float, samples: int = 4000, seconds: float = 0.25, **more: Any
) -> Progress:
    """Progress `after_s` seconds into training; epoch and cursor follow from the step, as in `plan()`."""
    epoch, within = divmod(step, 469)
    given = {"epoch": epoch, "cursor": within * 128, "phases": PHASES, "lr": 0.05, **more}
    return Progress(time=START + 2 + after_s, worker_id=rank, step=step, samples=samples, seconds=seconds, **given)


def loss_at(step: int) -> float:
    return 2.3 * math.exp(-step / 150) + 0.04 + 0.03 * math.sin(step * 1.7) * math.exp(-step / 500)


def evaluated(epoch: int, after_s: float, accuracy: float) -> Evaluated:
    metrics = {"test/loss": 0.2 / epoch, "test/accuracy": accuracy}
    return Evaluated(time=START + 2 + after_s, epoch=epoch, step=469 * epoch, metrics=metrics, seconds=0.8)


def saved(step: int, after_s: float) -> CheckpointSaved:
    path = f"{RUN_DIR}/checkpoints/{step}"
    return CheckpointSaved(time=START + 2 + after_s, step=step, path=path, bytes=1_720_000, seconds=0.02)


def summary(workers: int = 2, **changes: Any) -> Summary:
    given: dict[str, Any] = {
        "time": START + 26,
        "metrics": {"train/loss": 0.0123, "test/loss": 0.0412, "test/accuracy": 0.9871},
        "samples_per_s": 61_234.0,
        "seconds": 23.4,
        "steps": 1407,
        "epochs": 3.0,
        "workers": workers,
        "run_dir": RUN_DIR,
        **changes,
    }
    return Summary(**given)


def training(
    workers: int = 2, *, until_step: int = 1407, from_step: int = 0, steps_per_event: int = 67
) -> Iterator[Event]:
    """Training and evaluating as the workers tell of it: an event each quarter of a second and at epochs' ends."""
    step, clock = from_step, 0.0
    accuracies = {1: 0.9712, 2: 0.9833, 3: 0.9871}
    yield from (ready(rank) for rank in range(workers))
    while step < until_step:
        here = min(steps_per_event, until_step - step, 469 - step % 469)
        step += here
        clock += 0.25 * here / steps_per_event
        loss = loss_at(step)
        for rank in range(workers):
            slower = 1 - 0.06 * (rank % 3)
            yield progress(
                rank,
                step=step,
                after_s=clock,
                samples=here * 128 // workers,
                seconds=0.25 * here / steps_per_event / slower,
                loss=loss,
                accuracy=1 - loss / 4,
            )
        if step % 469 == 0:
            yield evaluated(step // 469, clock, accuracies[step // 469])
            yield saved(step, clock)
            clock += 0.8


def own_loop_training(workers: int = 2, *, steps: int = 400) -> Iterator[Event]:
    yield from (ready(rank) for rank in range(workers))
    for i, step in enumerate(range(10, steps + 1, 10)):
        for rank in range(workers):
            yield progress(
                rank,
                step=step,
                after_s=0.25 * (i + 1),
                samples=320,
                epoch=step // 100,
                cursor=step % 100,
                phases=OWN_PHASES,
            )
        metrics = {"loss": loss_at(step)} | ({"val_accuracy": 1 - loss_at(step) / 4} if step % 100 == 0 else {})
        yield MetricsLogged(time=START + 2 + 0.25 * (i + 1), worker_id=0, step=step, metrics=metrics)
