"""What was found to be fastest in earlier runs, so that it is measured once for a model, a machine and a version.

Here: a small JSON file in the user's cache folder. It is a convenience: whatever is wrong with it, measuring is the
answer. Not here: measuring (`calibrate.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from syncline import __version__
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan
from syncline.plan.tuning import PASSES, Finding, Tuning

__all__ = ["cache_file", "forget", "key_of", "look_up", "remember"]

_MOST_ENTRIES = 200


def cache_file() -> Path:
    """Where it is: in `$XDG_CACHE_HOME`, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / "tuning.json"


def key_of(model: nn.Module, plan: Plan, samples: int) -> str:
    """What a finding depends on: the model, how many samples a worker has in a step, the machine, the versions.

    And what there was to choose from, which changes more often than the version.
    """
    machine = Machine.here()
    worker = plan.workers[0]
    facts = [
        __version__, torch.__version__, machine.processor, machine.cores, torch.backends.cpu.get_cpu_capability(),
        worker.device, worker.threads, plan.size, samples, plan.measured, plan.memory_format, plan.precision,
        repr(model), [list(p.shape) for p in model.parameters()], PASSES,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def look_up(key: str) -> tuple[Tuning, tuple[Finding, ...]] | None:
    """What was found before, if anything."""
    entry = _read().get(key)
    try:
        return msgspec.convert(entry, tuple[Tuning, tuple[Finding, ...]])
    except msgspec.ValidationError:
        return None


def remember(key: str, tuning: Tuning, findings: tuple[Finding, ...]) -> None:
    """For the next run. The oldest are forgotten."""
    entries = _read()
    entries.pop(key, None)
    _write({**entries, key: [asdict(tuning), [asdict(finding) for finding in findings]]})


def forget(key: str) -> None:
    """It is to be measured again."""
    entries = _read()
    entries.pop(key, None)
    _write(entries)


def _write(entries: dict[str, Any]) -> None:
    kept = dict(list(entries.items())[-_MOST_ENTRIES:])
    with contextlib.suppress(OSError):  # a home that cannot be written to: measured again next time
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
            json.dump(kept, new)
        os.replace(new.name, path)


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
