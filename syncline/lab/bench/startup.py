"""Time from the command to the first training step.

Here: the real commands, each started as a user would. "First training step" means the same for all: the moment, by the
machine's clock, at which rank 0 has completed its first optimizer step. LeNet, one batch of 128 random images in
memory, SGD with momentum, one thread per process, Python and torch as installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.processes import free_port, time_to_first_step
from syncline.lab.bench.scripts.startup_samples import BATCH

_SCRIPTS = Path(__file__).parent / "scripts"
_TIMEOUT_S = 180.0
_WORKERS = 2


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """One suite. A quick bench has fewer contenders, since a startup cannot be shortened."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        suite = _suite(Path(folder))
        yield replace(suite, contenders=suite.contenders[:2], goals=suite.goals[:1]) if settings.quick else suite


def _suite(folder: Path) -> Suite:
    return Suite(
        name="startup",
        measures=f"Time from the command to the end of the first training step: LeNet, {_WORKERS} workers, "
        f"batch {BATCH}, images in memory, one thread per process.",
        unit="s",
        baseline="torchrun, DDP",
        contenders=(
            Contender(
                name="torchrun, DDP",
                measure=_timed(_torchrun, folder),
                what="torchrun --nproc-per-node 2 with DistributedDataParallel on gloo.",
            ),
            Contender(
                name="syncline train",
                measure=_timed(lambda: _syncline("startup_task.py", folder), folder),
                what="syncline train --workers 2, with a model by name.",
            ),
            Contender(
                name="syncline train, own model",
                measure=_timed(lambda: _syncline("startup_own_model.py", folder), folder),
                what="syncline train --workers 2, with a model in the task file, which imports torch for it.",
            ),
            Contender(
                name="python",
                measure=_timed(lambda: [sys.executable, str(_SCRIPTS / "startup_plain.py")], folder),
                what="One process without any framework, for reference.",
            ),
        ),
        goals=(
            Goal(contender="syncline train", limit=1.0),
            Goal(contender="syncline train, own model", limit=1.0),
        ),
    )


def _timed(command: Callable[[], list[str]], folder: Path) -> Callable[[], float]:
    def measure() -> float:
        return time_to_first_step(command(), environment=environment(), folder=folder, timeout_s=_TIMEOUT_S)

    return measure


def environment() -> dict[str, str]:
    """The same for all: one thread, loopback, and this Syncline even if it is not installed."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
    }


def _torchrun() -> list[str]:
    # The module behind the command `torchrun`. A free port, so that concurrent jobs do not clash.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_WORKERS)]
    return [*launcher, "--master-port", str(free_port()), str(_SCRIPTS / "startup_ddp.py")]


def _syncline(task: str, folder: Path) -> list[str]:
    # One batch and one epoch: the first step ends the epoch, and at its end a worker reports progress with the time.
    options = ["--workers", str(_WORKERS), "--batch", str(BATCH), "--epochs", "1", "--threads", "1"]
    command = [sys.executable, "-m", "syncline.cli.main", "train", f"{_SCRIPTS / task}:task"]
    return [*command, *options, "--json", "--out", str(folder / "runs")]
