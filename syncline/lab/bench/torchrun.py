"""A plain DDP script, unchanged, under `syncline run` and under torchrun.

Here: training throughput, and the time from kill -9 of a worker to the first step of the restarted script. Both
commands are started as a user would, run the same file (`scripts/torchrun_ddp.py`), and use one thread per worker. The
script measures itself. Not here: Syncline's own loop (`training.py`), and its recovery without a restart
(`recovery.py`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

from syncline.errors import SynclineError
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.processes import output_of
from syncline.lab.bench.scripts.torchrun_ddp import BATCH
from syncline.lab.bench.startup import environment

_SCRIPT = Path(__file__).parent / "scripts" / "torchrun_ddp.py"
WORKERS = 2
_TIMEOUT_S = 180.0
_FASTER = 1.15
_RESTART = 0.3
"""Goal: a restart takes this share of torchrun's time."""

Command = Callable[[Path, list[str]], list[str]]
"""The command line for a folder and the arguments of the script."""


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Throughput, then the restart. A quick bench trains for fewer steps."""
    steps = 20 if settings.quick else 200
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        yield Suite(
            name="torchrun",
            measures=f"A plain DDP script, unchanged: LeNet, {WORKERS} workers with one thread each, {BATCH} random "
            f"images per worker: images per second over all workers, over {steps} steps.",
            unit="images/s",
            contenders=_contenders(folder, [str(steps)]),
            baseline="torchrun",
            goals=(Goal(contender="syncline run", limit=_FASTER, bound="at least"),),
        )
        yield Suite(
            name="torchrun-restart",
            measures=f"The same script: time from kill -9 of one of {WORKERS} workers to the first step of the "
            "restarted script.",
            unit="s",
            contenders=_contenders(folder, ["1", "--kill"]),
            baseline="torchrun",
            goals=(Goal(contender="syncline run", limit=_RESTART),),
        )


def _contenders(folder: Path, arguments: list[str]) -> tuple[Contender, ...]:
    return (
        Contender(
            name="torchrun",
            measure=lambda: measure(torchrun, folder, _SCRIPT, arguments),
            what=f"torchrun --nproc-per-node {WORKERS} --max-restarts 1, DistributedDataParallel on gloo.",
        ),
        Contender(
            name="syncline run",
            measure=lambda: measure(syncline_run, folder, _SCRIPT, arguments),
            what=f"syncline run --workers {WORKERS}: shared memory in gloo's place.",
        ),
    )


def measure(command: Command, folder: Path, script: Path, arguments: list[str]) -> float:
    """Run `script`, and return what it has measured."""
    result = folder / "result"
    for path in (result, result.with_suffix(".killed")):
        path.unlink(missing_ok=True)
    words = command(folder, [str(script), str(result), *arguments])
    # Without this, workers that torchrun restarts wait for the dead ones (github.com/pytorch/pytorch/issues/135712).
    settings = {**os.environ, **environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    output = output_of(words, environment=settings, folder=folder, timeout_s=_TIMEOUT_S)
    try:
        return float(result.read_text())
    except (OSError, ValueError):
        raise SynclineError(f"{script.name} has measured nothing. Its output:\n{output}") from None


def torchrun(folder: Path, script: list[str]) -> list[str]:
    """The command that runs a script for torch.distributed under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
    launcher += ["--max-restarts", "1", "--log-dir", str(folder / "logs")]
    # Port 0: any free port, so that concurrent jobs do not clash.
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *script]


def syncline_run(folder: Path, script: list[str], *more: str) -> list[str]:
    """The command that runs a script under Syncline, with `more` options."""
    options = ["--workers", str(WORKERS), "--threads", "1", "--out", str(folder / "runs"), *more]
    path, *arguments = script
    return [sys.executable, "-m", "syncline.cli.main", "run", path, *options, "--", *arguments]
