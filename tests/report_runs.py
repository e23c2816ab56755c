"""Run directories made of scripted events, for what reads them: the report and the live page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from syncline.planning.plan import Plan, WorkerPlan
from syncline.telemetry.events import (
    Evaluated,
    Event,
    Progress,
    RunStarted,
    Summary,
    WorkerReady,
    to_line,
)
from syncline.telemetry.predictions import Example, Pair, Picture, Predictions, write_predictions
from syncline.telemetry.run_dir import RunDir

START = 1_000_000.0
PHASES = {"data": 0.01, "forward": 0.05, "backward": 0.09, "exchange": 0.02, "waiting": 0.03, "update": 0.05}
STEPS_PER_EPOCH = 10
PREDICTIONS = Predictions(
    epoch=3,
    step=30,
    classes=3,
    pairs=[Pair(0, 0, 8), Pair(0, 1, 1), Pair(1, 1, 5), Pair(2, 2, 6), Pair(2, 0, 3)],
    examples=[Example(7, 2, 0, 0.97, Picture(2, 2, 1, bytes([0, 90, 180, 255]))), Example(3, 0, 1, 0.6)],
    class_names=["cat", "dog", "<owl>"],
)


def plan(workers: int = 2, **changes: Any) -> dict[str, Any]:
    made = Plan(
        kind="train", model="lenet", data="digits", strategy="allreduce", collective="shared-memory", seed=0, epochs=3,
        workers=tuple(WorkerPlan(rank=r, host="here", device="cpu", threads=1) for r in range(workers)), batch=100,
        train_samples=1000, test_samples=23, steps_per_epoch=STEPS_PER_EPOCH, total_steps=30, accumulate=1,
        loaders=None, evaluate_every=1, checkpoint_every_s=30.0, checkpoint_every_steps=None, keep_checkpoints=3,
        on_nan="stop", batch_norm="global", shared_memory_bytes=10**9, exchange_timeout_s=300.0, fingerprint="0",
    )  # fmt: skip
    return {**made.to_dict(), **changes}


def started(at: float = START, *, after_step: int | None = None, workers: int = 2, **changes: Any) -> RunStarted:
    machine = {"host": "here", "cores": 2, "processor": "x86_64", "python": "3.11"}
    return RunStarted(
        time=at, run_dir="runs/scripted", plan=plan(workers, **changes), machine=machine, resumed_from_step=after_step
    )


def progress(step: int, rank: int = 0, *, at: float | None = None, **more: Any) -> Progress:
    """After `step` steps, which take half a second each."""
    epoch, within = divmod(step, STEPS_PER_EPOCH)
    facts = {"loss": 2.0 / step, "accuracy": step / 40, "lr": 0.1, "phases": PHASES, **more}
    time = START + 2 + 0.5 * step if at is None else at
    return Progress(
        time=time, worker_id=rank, epoch=epoch, cursor=100 * within, step=step, samples=50, seconds=0.25, **facts
    )


def whole_run(steps: int = 30, *, workers: int = 2, ends: bool = True) -> list[Event]:
    """All events of a run that goes as it should; without its end, if it does not `end`."""
    events: list[Event] = [started(workers=workers)]
    events += [
        WorkerReady(time=START + 1, worker_id=r, pid=1, parameters=9, collective="SharedMemory") for r in range(workers)
    ]
    for step in range(1, steps + 1):
        events += [progress(step, rank) for rank in range(workers)]
        if step % STEPS_PER_EPOCH == 0:
            metrics = {"test/loss": 2.1 / step, "test/accuracy": step / 31}
            time = START + 2.1 + 0.5 * step
            events.append(Evaluated(time=time, epoch=step // STEPS_PER_EPOCH, step=step, metrics=metrics, seconds=0.1))
    if ends:
        events.append(
            Summary(
                time=START + 3 + 0.5 * steps, metrics={"test/accuracy": 0.97, "test/loss": 0.06, "train/loss": 0.06},
                samples_per_s=400.0, seconds=18.0, steps=steps, epochs=3.0, workers=workers, run_dir="runs/scripted",
                peak_memory_bytes={0: 200_000_000, 1: 210_000_000},
            )
        )  # fmt: skip
    return events


def write_run(path: Path, events: Iterable[Event], *, predictions: Predictions | None = PREDICTIONS) -> Path:
    """A run directory that holds these events."""
    path.mkdir(parents=True)
    run_dir = RunDir(path)
    run_dir.plan.write_text(json.dumps(plan()))
    run_dir.events.write_bytes(b"".join(to_line(event) + b"\n" for event in events))
    if predictions is not None:
        write_predictions(run_dir, predictions)
    return path


def nobody(path: Path) -> bool:
    """For runs that nobody works on any more."""
    del path
    return False
