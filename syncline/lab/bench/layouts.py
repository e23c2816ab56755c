"""Layouts beside each other, and beside torch's own: time per step, and memory per worker.

Here: `sharded`, `pipeline(2)` and `tensor(2)` beside `replicated`, all by `syncline.train` with two workers of one
thread, for twelve linear layers and the zoo's transformer; FSDP2 and torch's 1F1B by hand for the former
(`scripts/layouts_fsdp.py`, `scripts/layouts_1f1b.py`). Not here: throughput of models
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
from syncline.lab.bench.scripts.layouts_1f1b import MICRO_BATCHES
from syncline.lab.bench.scripts.layouts_fsdp import BATCH, LAYERS, WIDTH, layers
from syncline.lab.bench.torchrun import WORKERS, measure, torchrun
from syncline.result import Result
from syncline.telemetry.events import Progress
from syncline.telemetry.run_dir import RunDir

_SCRIPTS = Path(__file__).parent / "scripts"
_FIRST_STEP = 20
"""Earlier steps do not count."""
_SLOWER, _FASTER_THAN_FSDP, _SMALLER = 1.3, 1 / 3, 0.8
_PIPELINE = f"pipeline({WORKERS}, cut={LAYERS // WORKERS}, micro_batches={MICRO_BATCHES})"
"""As torch's own is cut."""
_Train = Callable[[str], Result]


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Time per step of both models, then memory. A quick bench trains for fewer steps."""
    steps = 100 if settings.quick else 400
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        fsdp = Contender(
            name="FSDP2",
            measure=lambda: measure(torchrun, folder, _SCRIPTS / "layouts_fsdp.py", [str(steps)]),
            what="torch's fully_shard on each layer, on gloo, under torchrun.",
        )
        pipeline = Contender(
            name="torch 1F1B",
            measure=lambda: measure(torchrun, folder, _SCRIPTS / "layouts_1f1b.py", [str(steps)]),
            what=f"torch's Schedule1F1B, cut in the middle, {MICRO_BATCHES} micro-batches, on gloo, under torchrun.",
        )
        linear, transformer = _linear(folder, steps), _transformer(folder, steps // 3)
        yield Suite(
            name="layouts-linear",
            measures=f"{LAYERS} x Linear({WIDTH}), AdamW, batch {BATCH}, {WORKERS} workers: median time per step.",
            unit="ms",
            contenders=(*_contenders(linear, _step_ms), *_others(linear, _step_ms), fsdp),
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
            name="layouts-beside-1f1b",
            measures="The same: pipeline(2) beside torch's own 1F1B on the same cut.",
            unit="ms",
            contenders=(pipeline, _contender(linear, _step_ms, _PIPELINE)),
            baseline="torch 1F1B",
            goals=(Goal(contender=_PIPELINE, limit=1.0),),
        )
        yield Suite(
            name="layouts-transformer",
            measures=f"The zoo's transformer on tiny Shakespeare, {WORKERS} workers: median time per step.",
            unit="ms",
            contenders=_contenders(transformer, _step_ms) + _others(transformer, _step_ms),
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
    return _contender(run, of_result, "replicated"), _contender(run, of_result, "sharded")


def _others(run: _Train, of_result: Callable[[Result], float]) -> tuple[Contender, ...]:
    return tuple(_contender(run, of_result, layout) for layout in (f"pipeline({WORKERS})", f"tensor({WORKERS})"))


def _contender(run: _Train, of_result: Callable[[Result], float], layout: str) -> Contender:
    return Contender(name=layout, measure=lambda: of_result(run(layout)), what=f"syncline.train(layout={layout!r}).")


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
