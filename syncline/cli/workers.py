"""`syncline workers RUN add|remove N`: wish for it, and wait until the run has done it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from syncline.coordinator.requests import Wish, is_live, wish
from syncline.errors import ConfigError, SynclineError
from syncline.telemetry.events import WentOn
from syncline.telemetry.run_dir import RunDir

__all__ = ["change_workers"]

_LIMIT_S = 120.0
_LOOK_S = 0.1


def change_workers(run_dir: Path, *, add: int = 0, remove: int = 0) -> Iterator[str]:
    """What is done, line by line, as it happens."""
    found = RunDir.existing(run_dir)
    before = _members(found)
    if remove >= len(before):
        raise ConfigError(
            f"{run_dir} has {len(before)} workers now, so at most {len(before) - 1} can go. To end it, press Ctrl-C "
            "where it runs: its work is saved."
        )
    batch = int(found.read_plan()["batch"])
    if batch and len(before) + add > batch:
        raise ConfigError(
            f"{len(before) + add} workers cannot share a batch of {batch}: some would have nothing to do."
        )
    wish(run_dir, Wish(add=add, remove=remove))
    yield f"asked for {len(before) + add - remove} workers instead of {len(before)}"
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        now = _members(found)
        if len(now) == len(before) + add - remove:
            yield f"workers now: {', '.join(map(str, now))}"
            return
        if not is_live(run_dir):
            yield "the run has ended meanwhile"
            return
        time.sleep(_LOOK_S)
    raise SynclineError(f"The run has not changed its workers within {_LIMIT_S:g} s; see {found.events}.")


def _members(run_dir: RunDir) -> list[int]:
    members = list(range(len(run_dir.read_plan()["workers"])))
    for event in run_dir.read_events():
        if isinstance(event, WentOn):
            members = event.members
    return members
