"""What every probe is given and gives back, and running an adapter.

Here: `Bench`, `Round`, and `run_adapter`. Not here: the probes (one file per subject).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import SynclineError
from syncline.lab.bench.peer_recipes import PeerFramework
from syncline.lab.bench.processes import free_port, last_lines, output_of
from syncline.lab.survey.catalog import Column, Entry
from syncline.lab.survey.frameworks import variables_for
from syncline.lab.survey.values import Absent, Check

LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how one round of one framework is measured."""

    entry: Entry
    peer: PeerFramework
    python: Path
    environments: Path
    is_quick: bool
    scratch: Path
    limit_s: float = LIMIT_S

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.entry.columns


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: a number, the outcome of a check, or a reason for each column."""

    values: Mapping[str, float | Check | Absent]
    version: str


Probe = Callable[[Bench], Round]


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much an adapter trains."""

    workers: int = 2
    batch: int = 64
    warm_up: int = 50
    steps: int = 300


def command_of(bench: Bench, work: Work) -> list[str]:
    """The command of its `peer.toml`."""
    values = {
        "python": bench.python,
        "bin": bench.python.parent,
        "adapter": bench.peer.folder / "adapter.py",
        "workers": work.workers,
        "batch": work.batch,
        "warm_up": work.warm_up,
        "steps": work.steps,
        "port": free_port(),
        "scratch": bench.scratch / "runs",
    }
    return [part.format_map(values) for part in bench.peer.start]


def run_adapter(bench: Bench, work: Work) -> dict[str, Any]:
    """Train, and return its event `measured`."""
    output = output_of(
        command_of(bench, work),
        environment=variables_for(bench.peer, bench.python),
        folder=bench.scratch,
        timeout_s=bench.limit_s,
    )
    return last_event(output, "measured", "images_per_s", "version")


def last_event(output: str, kind: str, *fields: str) -> dict[str, Any]:
    """The last event of this kind on a standard output; it must have these fields."""
    for line in reversed(output.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == kind:
            missing = [field for field in fields if field not in event]
            if missing:
                raise SynclineError(f"The adapter printed an event {kind!r} without {', '.join(missing)}: {line}")
            return dict(event)
    raise SynclineError(f"The adapter printed no event {kind!r}. Its last output:\n{last_lines(output)}")
