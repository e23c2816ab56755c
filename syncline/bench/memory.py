"""How much memory a training step takes, by the size of its batch.

Here: ResNet-50 on images of CIFAR-10's shape, one process that takes one step (forward, backward, update), started anew
for each figure (`scripts/memory_step.py`). What is measured is its peak of resident memory while training, with all
that belongs to the process: some 300 MB of it are Python and torch. A batch for which this machine has too little
memory is left out.

A step of a large batch takes minutes, so each figure is taken once and stands for all rounds: their spread says nothing
here. Two runs of the same step were up to 4% apart.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.processes import output_of
from syncline.comms.segment import memory_available
from syncline.errors import SynclineError

__all__ = ["BATCHES", "expected_mb", "suites"]

BATCHES = (32, 64, 128, 256, 512, 1024)
_QUICK = 2
_LIMIT = "1500MB"
_PLAIN = "plain PyTorch loop"
_TIMEOUT_S = 3600.0
_OF_WHAT_IS_FREE = 0.8
_FIRST_GUESS_MB = 3000.0
_GOAL = 1.1


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """A suite for each batch that fits."""
    known: dict[int, float] = {}
    for batch in BATCHES[:_QUICK] if settings.quick else BATCHES:
        needed, free = expected_mb(known, batch), _OF_WHAT_IS_FREE * memory_available() / 1e6
        if needed > free:
            settings.say(f"A batch of {batch} is left out: it needs about {needed:,.0f} MB, and {free:,.0f} are free.")
            continue
        yield _suite(batch, known)


def expected_mb(known: Mapping[int, float], batch: int) -> float:
    """What a batch will need, to judge by the peaks of two smaller ones; a guess if there are none."""
    if len(known) < 2:
        return max([_FIRST_GUESS_MB, *(peak * batch / smaller for smaller, peak in known.items())])
    (few, low), (many, high) = sorted(known.items())[-2:]
    return high + (batch - many) * max(0.0, high - low) / (many - few)


def _suite(batch: int, known: dict[int, float]) -> Suite:
    def contender(name: str, settings: dict[str, Any] | None, what: str) -> Contender:
        return Contender(name=name, measure=functools.cache(lambda: _peak_mb(batch, settings)), what=what)

    def plain() -> float:
        known[batch] = _peak_mb(batch, None)
        return known[batch]

    return Suite(
        name=f"memory-{batch}",
        measures=f"Peak memory of one training step of ResNet-50 on a batch of {batch} images of 3 x 32 x 32, in a "
        "process of its own. Each figure was taken once and stands for all rounds; runs differ by a few percent.",
        unit="MB",
        baseline=_PLAIN,
        contenders=(
            Contender(
                name=_PLAIN,
                measure=functools.cache(plain),
                what="As the tutorial writes it; torch loads its compiler for the optimiser.",
            ),
            contender("syncline", {}, "The worker's own loop, one worker."),
            contender(
                "syncline --checkpoint-activations",
                {"checkpoint_activations": True},
                "Each block keeps its input only and is computed twice.",
            ),
            contender(
                f"syncline --memory-limit {_LIMIT}",
                {"memory_limit": _LIMIT},
                "In as many pieces as the limit takes; batch norm then sees one piece at a time.",
            ),
        ),
        goals=(Goal(contender="syncline", limit=_GOAL),),
    )


def _peak_mb(batch: int, settings: dict[str, Any] | None) -> float:
    way = "plain" if settings is None else json.dumps(settings)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    said = output_of(
        [sys.executable, "-m", "syncline.bench.scripts.memory_step", str(batch), way],
        environment={**os.environ, "PYTHONPATH": path},
        folder=Path.cwd(),
        timeout_s=_TIMEOUT_S,
    )
    try:
        return float(said.split()[-1])
    except (ValueError, IndexError):
        raise SynclineError(f"The step did not tell its memory. It said: {said!r}.") from None
