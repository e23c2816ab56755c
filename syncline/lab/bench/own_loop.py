"""A user's own training script with convolutions: `syncline run` beside one process and beside DDP.

Here: training throughput of one file (`scripts/image_script.py`) on two cores: one process with two threads, DDP with
two processes, Syncline with two workers, replicated and sharded. All are started as a user would. Not here: the
built-in loop (`training.py`) and scripts for torchrun (`torchrun.py`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from functools import partial
from pathlib import Path

from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.scripts.image_script import BATCH
from syncline.lab.bench.torchrun import WORKERS, Command, measure, syncline_run, torchrun

_SCRIPT = Path(__file__).parent / "scripts" / "image_script.py"
_FASTER_THAN_ONE, _FASTER_THAN_DDP = 1.5, 1.8


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Once beside one process, once beside DDP. A quick bench trains for fewer steps."""
    steps = 60 if settings.quick else 400
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        run = partial(_contender, Path(name), steps)
        what = (
            f"A script with the network of PyTorch's MNIST example, {BATCH} random images per step: images per second"
        )
        syncline = run(
            "syncline run", syncline_run, "syncline", f"syncline run --workers {WORKERS}: two changed lines."
        )
        sharded = run(
            "syncline run, sharded", _sharded, "syncline", "The same with --layout sharded: workers divide the update."
        )
        alone = run("one process", _alone, "alone", f"python, one process with {WORKERS} threads.")
        ddp = run("DDP", torchrun, "ddp", f"torchrun with {WORKERS} processes, one thread each, on gloo.")
        for baseline, goal in ((alone, _FASTER_THAN_ONE), (ddp, _FASTER_THAN_DDP)):
            yield Suite(
                name=f"own-loop-beside-{baseline.name.replace(' ', '-').lower()}",
                measures=f"{what}, over {steps} steps.",
                unit="images/s",
                contenders=(baseline, syncline, sharded),
                baseline=baseline.name,
                goals=tuple(Goal(contender=c.name, limit=goal, bound="at least") for c in (syncline, sharded)),
            )


def _contender(folder: Path, steps: int, name: str, command: Command, mode: str, what: str) -> Contender:
    return Contender(name=name, measure=lambda: measure(command, folder, _SCRIPT, [str(steps), mode]), what=what)


def _sharded(folder: Path, script: list[str]) -> list[str]:
    return syncline_run(folder, script, "--layout", "sharded")


def _alone(folder: Path, script: list[str]) -> list[str]:
    del folder
    return [sys.executable, *script]
