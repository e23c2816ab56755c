"""Peak memory of a training step, by batch size.

Here: ResNet-50 on images of CIFAR-10's shape; a fresh process per figure takes one step (forward, backward, update;
`scripts/memory_step.py`). Measured is its peak resident memory while training, of which some 300 MB are Python and
torch. Batches that do not fit into this machine's memory are skipped.

A step with a large batch takes minutes, so each figure is measured once and stands for all rounds: their spread means
nothing here. Two runs of the same step were up to 4% apart.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from syncline.comms.segment import memory_available
from syncline.errors import SynclineError
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.processes import output_of

BATCHES = (32, 64, 128, 256, 512, 1024)
_QUICK = 2
_LIMIT = "1500MB"
_PLAIN = "plain PyTorch loop"
_TIMEOUT_S = 3600.0
_SHARE_OF_FREE = 0.8
_FIRST_GUESS_MB = 3000.0
_GOAL = 1.1


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """One suite per batch size that fits."""
    known: dict[int, float] = {}
    for batch in BATCHES[:_QUICK] if settings.quick else BATCHES:
        needed, free = expected_mb(known, batch), _SHARE_OF_FREE * memory_available() / 1e6
        if needed > free:
            settings.say(f"Batch {batch} is skipped: it needs about {needed:,.0f} MB, and {free:,.0f} MB are free.")
            continue
        yield _suite(batch, known)


def expected_mb(known: Mapping[int, float], batch: int) -> float:
    """The memory a batch will need, extrapolated from two smaller ones; a guess without them."""
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
        measures=f"Peak memory of one training step of ResNet-50 with batch {batch}, images of 3 x 32 x 32, in a "
        "separate process. Each figure is measured once and stands for all rounds; runs differ by a few percent.",
        unit="MB",
        baseline=_PLAIN,
        contenders=(
            Contender(
                name=_PLAIN,
                measure=functools.cache(plain),
                what="As in PyTorch's tutorial; torch loads its compiler for the optimizer.",
            ),
            contender("syncline", {}, "Syncline's worker loop, one worker."),
            contender(
                "syncline --checkpoint-activations",
                {"checkpoint_activations": True},
                "Each block keeps only its input and recomputes its activations.",
            ),
            contender(
                f"syncline --memory-limit {_LIMIT}",
                {"memory_limit": _LIMIT},
                "In as many micro-batches as the limit requires; batch norm then sees one micro-batch at a time.",
            ),
        ),
        goals=(Goal(contender="syncline", limit=_GOAL),),
    )


def _peak_mb(batch: int, settings: dict[str, Any] | None) -> float:
    method = "plain" if settings is None else json.dumps(settings)
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    output = output_of(
        [sys.executable, "-m", "syncline.lab.bench.scripts.memory_step", str(batch), method],
        environment={**os.environ, "PYTHONPATH": path},
        folder=Path.cwd(),
        timeout_s=_TIMEOUT_S,
    )
    try:
        return float(output.split()[-1])
    except (ValueError, IndexError):
        raise SynclineError(f"The step did not print its memory, but: {output!r}.") from None
