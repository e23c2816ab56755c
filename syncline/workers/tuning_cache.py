"""The cache of tuning results: a model is measured once per machine and version.

Here: a small JSON file in the user's cache folder. If it is missing, damaged or another user's, the model is measured
again. Not here: measuring (`calibrate.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from syncline import __version__
from syncline.compute.tuning import PASSES, Tuning, TuningResult
from syncline.config.owned_files import cache_folder, make_cache, read_owned, replace_file
from syncline.errors import ConfigError
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan

_MOST_ENTRIES = 200


def cache_file() -> Path:
    return cache_folder("tuning.json")


def key_of(model: nn.Module, plan: Plan, samples: int) -> str:
    """What results depend on: the model, the samples per worker and step, the machine, the versions.

    Also the available algorithms, which change more often than the version.
    """
    machine = Machine.here()
    worker = plan.workers[0]
    facts = [
        __version__, torch.__version__, machine.processor, machine.cores, torch.backends.cpu.get_cpu_capability(),
        plan.kind, worker.device, worker.threads, plan.size, samples, plan.measured, plan.memory_format, plan.precision,
        repr(model), [list(p.shape) for p in model.parameters()], PASSES,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def look_up(key: str) -> tuple[Tuning, tuple[TuningResult, ...]] | None:
    """The cached tuning and results, if any."""
    entry = _read().get(key)
    try:
        return msgspec.convert(entry, tuple[Tuning, tuple[TuningResult, ...]])
    except msgspec.ValidationError:
        return None


def remember(key: str, tuning: Tuning, results: tuple[TuningResult, ...]) -> None:
    """Store for later runs; the oldest entries are dropped."""
    entries = _read()
    entries.pop(key, None)
    _write({**entries, key: [asdict(tuning), [asdict(result) for result in results]]})


def forget(key: str) -> None:
    """Remove an entry, so that the model is measured again."""
    entries = _read()
    entries.pop(key, None)
    _write(entries)


def _write(entries: dict[str, Any]) -> None:
    kept = dict(list(entries.items())[-_MOST_ENTRIES:])
    with contextlib.suppress(OSError, RuntimeError, ConfigError):  # a read-only home, none, or another user's
        make_cache(cache_file().parent)
        replace_file(cache_file(), json.dumps(kept).encode())


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(read_owned(cache_file()))
    except (OSError, RuntimeError, ValueError):  # a ConfigError is a ValueError
        return {}
    return entries if isinstance(entries, dict) else {}
