"""Layouts beside each other, and beside torch's own: time per step, and memory per worker.

Here: `sharded` beside `replicated`, both by `syncline.train` with two workers of one thread, for twelve linear layers
and the zoo's transformer; FSDP2 by hand for the former (`scripts/layouts_fsdp.py`). Not here: throughput of models
(`training.py`), memory by batch size (`memory.py`).
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from syncline.driver import train
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.scripts.layouts_fsdp import BATCH, LAYERS, WIDTH, layers
from syncline.lab.bench.torchrun import WORKERS, measure, torchrun
from syncline.result import Result
from syncline.telemetry.events import Progress
from syncline.telemetry.run_dir import RunDir

_SCRIPT = Path(__file__).parent / "scripts" / "layouts_fsdp.py"
_FIRST_STEP = 20
"""Earlier steps do not count."""
_SLOWER, _FASTER_THAN_FSDP, _SMALLER = 1.3, 1 / 3, 0.8
_Train = Callable[[str], Result]


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Time per step of both models, then memory. A quick bench trains for fewer steps."""
    steps = 100 if settings.quick else 400
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        fsdp = Contender(
            name="FSDP2",
            measure=lambda: measure(torchrun, folder, _SCRIPT, [str(steps)]),
            what="torch's fully_shard on each layer, on gloo, under torchrun.",
        )
        linear = _linear(folder, steps)
        yield Suite(
            name="layouts-linear",
            measures=f"{LAYERS} x Linear({WIDTH}), AdamW, batch {BATCH}, {WORKERS} workers: median time per step.",
            unit="ms",
            contenders=(*_contenders(linear, _step_ms), fsdp),
            baseline="replicated",
            goals=(Goal(contender="sharded", limit=_SLOWER),),
        )
        yield Suite(
            name="layouts-beside-fsdp",
            measures="The same: sharded beside FSDP2.",
            unit="ms",
            contenders=(fsdp, _contenders(linear, _step_ms)[1]),
            baseline="FSDP2",
            goals=(Goal(contender="sharded", limit=_FASTER_THAN_FSDP),),
        )
        yield Suite(
            name="layouts-transformer",
            measures=f"The zoo's transformer on tiny Shakespeare, {WORKERS} workers: median time per step.",
            unit="ms",
            contenders=_contenders(_transformer(folder, steps // 3), _step_ms),
            baseline="replicated",
            goals=(Goal(contender="sharded", limit=_SLOWER),),
        )
        yield Suite(
            name="layouts-memory",
            measures=f"3 x Linear(3000), AdamW, {WORKERS} workers: peak memory of the worker that saves no checkpoint.",
            unit="MB",
            contenders=_contenders(_large(folder), lambda result: min(result.peak_memory_bytes.values()) / 1e6),
            baseline="replicated",
            goals=(Goal(contender="sharded", limit=_SMALLER),),
        )


def _contenders(run: _Train, of_result: Callable[[Result], float]) -> tuple[Contender, Contender]:
    def contender(layout: str, what: str) -> Contender:
        return Contender(name=layout, measure=lambda: of_result(run(layout)), what=what)

    return (
        contender("replicated", "syncline.train: each worker holds all."),
        contender("sharded", "syncline.train(layout='sharded'): all workers hold one model together."),
    )


def _linear(folder: Path, steps: int) -> _Train:
    inputs = torch.randn(20 * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    return _training(folder, steps, model=layers(), data=(inputs, inputs), loss="mse", batch=BATCH)


def _transformer(folder: Path, steps: int) -> _Train:
    return _training(folder, steps, model="transformer", data="shakespeare")


def _large(folder: Path) -> _Train:
    return _training(folder, 30, model="mlp(hidden=[3000, 3000, 3000])", data="digits")


def _training(folder: Path, steps: int, **task: Any) -> _Train:
    settings: dict[str, Any] = {
        "workers": WORKERS, "threads": 1, "max_steps": steps, "epochs": 1000, "evaluate_every": 0, "tune": "off",
        "optimizer": "adamw", "checkpoint_every_s": 1e6, "out": str(folder / "runs"), "quiet": True,
    }  # fmt: skip

    def run(layout: str) -> Result:
        with contextlib.redirect_stdout(io.StringIO()):  # the run's summary
            return train(layout=layout, **settings, **task)

    return run


def _step_ms(result: Result) -> float:
    """The median over what worker 0 has reported, after the first steps."""
    times, before = [], 0
    for event in RunDir(result.run_dir).read_events():
        if isinstance(event, Progress) and event.worker_id == 0:
            if before >= _FIRST_STEP and event.step > before:
                times.append(1e3 * event.seconds / (event.step - before))
            before = event.step
    return statistics.median(times)
