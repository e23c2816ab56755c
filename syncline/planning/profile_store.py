"""Profiles of earlier runs, kept per machine: with one of the same task, the next run is predicted before it starts.

Here: a small JSON file in the user's cache folder, and `settled`, which decides between what is kept and what a run has
just shown. If the file is missing, damaged or another user's, nothing is known. Not here: what is predicted from a
profile (`forecaster.py`), and the results of tuning (`workers/tuning_cache.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from syncline import __version__
from syncline.config.owned_files import cache_folder, make_cache, read_owned, replace_file
from syncline.errors import ConfigError
from syncline.planning.cost.profile import Profile
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan

_MOST_KEYS = 200
_MOST_OF_A_KEY = 8
_AGREE = 0.1
"""Profiles whose steps differ by less than this part agree."""
_IMPLAUSIBLE = 2.0
"""A step that is so many times as fast as before must be seen twice."""
_FURTHEST = 4.0
"""A profile of so many times more or fewer samples says little."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The profile of a run, and the model that it trained."""

    profile: Profile
    shapes: Mapping[str, Sequence[int]]
    optimizer_slots: int
    made_at: float = field(default_factory=time.time)
    doubt_s: float | None = None
    """The step of the last run, if that contradicted this profile."""

    @property
    def numbers(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def store_file() -> Path:
    return cache_folder("profiles.json")


def key_of_task(plan: Plan, machine: Machine) -> str:
    """What computing a step depends on, besides how many workers and samples there are."""
    worker = plan.workers[0]
    return _digest([
        *_surroundings(machine), plan.kind, plan.fingerprint, plan.model, worker.device, worker.threads,
        plan.precision, plan.memory_format, plan.measured, plan.checkpoint_activations, plan.accumulate, plan.layout,
        plan.batch_norm,
    ])  # fmt: skip


def key_of_transport(plan: Plan, machine: Machine) -> str:
    """What exchanging depends on, whatever is trained."""
    return _digest([*_surroundings(machine), "transport", plan.collective, plan.size, plan.strategy])


def look_up(key: str) -> list[Kept]:
    """All that is kept under this key."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(_read().get(key, []), list[Kept])
    return []


def closest(found: Sequence[Kept], *, workers: int, share: float, strategy: str = "allreduce") -> Kept | None:
    """The profile whose load is most like this one; None if none is near.

    Of equals, that of the same strategy, then that of an all-reduce, whose phases are the best separated.
    """
    near = [one for one in found if max(one.profile.share / share, share / one.profile.share) <= _FURTHEST]
    if not near:
        return None

    def unlike(one: Kept) -> tuple[bool, float, int]:
        other = one.profile.strategy
        rank = [strategy, "allreduce", other].index(other)
        return one.profile.workers != workers, abs(math.log(one.profile.share / share)), rank

    return min(near, key=unlike)


def keep(key: str, new: Kept) -> None:
    """Store what a run has shown, in place of what is kept of the same load if it is the better of both."""
    entries = _read()
    try:
        found = msgspec.convert(entries.pop(key, []), list[Kept])
    except msgspec.ValidationError:
        found = []
    same = [one for one in found if _load(one) == _load(new)]
    others = [one for one in found if _load(one) != _load(new)]
    kept = [*others, settled(same[-1] if same else None, new)][-_MOST_OF_A_KEY:]
    _write({**entries, key: [asdict(one) for one in kept]})


def settled(old: Kept | None, new: Kept) -> Kept:
    """Which of two profiles of the same load is kept.

    Something else on the machine only ever makes a step slower, so the faster one counts. A slower one counts when it
    is seen twice in a row, for the machine has then changed, and so does one that is implausibly fast.
    """
    if old is None:
        return new
    before, now = old.profile.compute_s.mid, new.profile.compute_s.mid
    if abs(now - before) <= _AGREE * before:
        steadier = new if new.profile.compute_s.spread <= old.profile.compute_s.spread else old
        return dataclasses.replace(steadier, doubt_s=None)
    if before / _IMPLAUSIBLE <= now < before:
        return new
    if old.doubt_s is not None and abs(now - old.doubt_s) <= _AGREE * old.doubt_s:
        return new
    return dataclasses.replace(old, doubt_s=now)


def _load(kept: Kept) -> tuple[str, int, float]:
    return kept.profile.strategy, kept.profile.workers, round(kept.profile.share, 3)


def _surroundings(machine: Machine) -> list[Any]:
    return [__version__, version("torch"), machine.host, machine.processor, machine.cores]


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _write(entries: dict[str, Any]) -> None:
    kept = dict(list(entries.items())[-_MOST_KEYS:])
    with contextlib.suppress(OSError, RuntimeError, ConfigError):  # a read-only home, none, or another user's
        make_cache(store_file().parent)
        replace_file(store_file(), json.dumps(kept).encode())


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(read_owned(store_file()))
    except (OSError, RuntimeError, ValueError, RecursionError):  # a ConfigError is a ValueError
        return {}
    return entries if isinstance(entries, dict) else {}
