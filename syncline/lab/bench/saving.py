"""Checkpoints of a large model: what saving one costs in memory and in time.

Here: a transformer of 86 million parameters (a quick bench: 29 million) with SGD, by `syncline.train` with two workers
of one thread that save every few steps; the memory beside a hand-written loop with the share of one worker
(`scripts/saving_plain.py`), the time beside other steps of the same run. Not here: memory by batch size (`memory.py`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from syncline.driver import train
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.processes import output_of
from syncline.lab.bench.scripts.saving_plain import SHARE, BenchTransformer, samples
from syncline.lab.bench.torchrun import WORKERS
from syncline.result import Result
from syncline.telemetry.events import CheckpointSaved, Event, Progress
from syncline.telemetry.run_dir import RunDir

_PLAIN, _OTHER, _SAVING = "plain PyTorch loop", "other steps", "steps that save"
_LAYOUTS = ("replicated", "sharded")
_MOST_MEMORY, _SLOWER = 1.15, 1.10
_SAVE_EVERY = 5
_FIRST_STEP = 3
"""Earlier steps do not count."""
_TIMEOUT_S = 600.0


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Memory of both layouts, then the time of each."""
    layers, steps = (4, 4 * _SAVE_EVERY) if settings.quick else (12, 8 * _SAVE_EVERY)
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        run = functools.partial(_train, Path(name), layers, steps)
        yield Suite(
            name="saving-memory",
            measures=f"A transformer of {layers} layers, SGD, {WORKERS} workers that save every {_SAVE_EVERY} steps: "
            "peak memory of the worker that needs most.",
            unit="MB",
            baseline=_PLAIN,
            contenders=(
                Contender(name=_PLAIN, measure=lambda: _plain_mb(layers), what="One process, one worker's share."),
                *(_peak_of(layout, run) for layout in _LAYOUTS),
            ),
            goals=tuple(Goal(contender=layout, limit=_MOST_MEMORY) for layout in _LAYOUTS),
        )
        for layout in _LAYOUTS:
            yield _steps_of(layout, run)


def _peak_of(layout: str, run: Callable[[str], Result]) -> Contender:
    return Contender(
        name=layout,
        measure=lambda: max(run(layout).peak_memory_bytes.values()) / 1e6,
        what=f"syncline.train(layout='{layout}').",
    )


def _steps_of(layout: str, run: Callable[[str], Result]) -> Suite:
    """Both kinds of steps come from one run, so that the machine is in the same state."""
    last: list[tuple[float, float]] = []

    def times() -> tuple[float, float]:
        return step_times(list(RunDir(run(layout).run_dir).read_events()))

    def other() -> float:
        last[:] = [times()]
        return last[0][0]

    def saving() -> float:
        return (last or [times()])[0][1]

    return Suite(
        name=f"saving-{layout}",
        measures=f"The same, layout {layout}: median time of a step.",
        unit="ms",
        baseline=_OTHER,
        contenders=(
            Contender(name=_OTHER, measure=other, what="Steps of the same run, without a checkpoint."),
            Contender(name=_SAVING, measure=saving, what="Steps in which a checkpoint begins to be saved."),
        ),
        goals=(Goal(contender=_SAVING, limit=_SLOWER),),
    )


def step_times(events: Sequence[Event]) -> tuple[float, float]:
    """In ms, the medians of worker 0's other steps, and of those in which it saves.

    A checkpoint is saved after its step is reported, so its time is in the next one.
    """
    saved = {event.step for event in events if isinstance(event, CheckpointSaved)}
    other: list[float] = []
    saving: list[float] = []
    before = 0
    for event in events:
        if isinstance(event, Progress) and event.worker_id == 0:
            if event.step == before + 1 and before >= _FIRST_STEP:
                (saving if before in saved else other).append(1e3 * event.seconds)
            before = event.step
    return statistics.median(other), statistics.median(saving)


def _train(folder: Path, layers: int, steps: int, layout: str) -> Result:
    with contextlib.redirect_stdout(io.StringIO()):  # the run's summary
        return train(
            model=BenchTransformer(layers), data=samples(200), loss="cross_entropy", optimizer="sgd",
            batch=WORKERS * SHARE, workers=WORKERS, threads=1, layout=layout, max_steps=steps, epochs=1000,
            evaluate_every=0, tune="off", checkpoint_every_steps=_SAVE_EVERY, checkpoint_every_s=1e6,
            keep_checkpoints=1, out=str(folder / "runs"), quiet=True,
        )  # fmt: skip


def _plain_mb(layers: int) -> float:
    command = [sys.executable, "-m", "syncline.lab.bench.scripts.saving_plain", str(layers)]
    return float(output_of(command, environment=os.environ, folder=Path.cwd(), timeout_s=_TIMEOUT_S).split()[-1])
