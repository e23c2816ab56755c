"""`syncline workers RUN add|remove N`: request it, and wait until the run has done it."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.run_options import RunPath
from syncline.coordinator.requests import Request, is_live, send_request
from syncline.errors import ConfigError, SynclineError
from syncline.planning.planner import saved_plan
from syncline.telemetry.events import Recovered
from syncline.telemetry.run_dir import RunDir

_LIMIT_S = 120.0
_LOOK_S = 0.1


class Change(enum.StrEnum):
    """What to do with the number of workers."""

    ADD = "add"
    REMOVE = "remove"


def workers(
    run_dir: RunPath,
    change: Annotated[Change, typer.Argument(help="Add or remove workers.")],
    number: Annotated[int, typer.Argument(metavar="N", min=1, help="How many.")],
) -> None:
    """Add workers to a live run, or remove some.

    syncline workers runs/lenet-mnist-20260101-120000 add 2
    syncline workers runs/lenet-mnist-20260101-120000 remove 1
    """
    is_add = change is Change.ADD
    for line in change_workers(run_dir, add=number if is_add else 0, remove=0 if is_add else number):
        typer.echo(line)


def change_workers(run_dir: Path, *, add: int = 0, remove: int = 0) -> Iterator[str]:
    """Request the change and report its progress, line by line."""
    found = RunDir.existing(run_dir)
    before = _members(found)
    if remove >= len(before):
        raise ConfigError(
            f"{run_dir} has {len(before)} workers, so at most {len(before) - 1} can be removed. To stop the run, press "
            "Ctrl-C where it runs; it saves a checkpoint."
        )
    batch = saved_plan(found.read_plan(), found.plan).batch
    if batch and len(before) + add > batch:
        raise ConfigError(f"{len(before) + add} workers cannot share a batch of {batch}: some would have no samples.")
    send_request(run_dir, Request(add=add, remove=remove))
    yield f"requested {len(before) + add - remove} workers instead of {len(before)}"
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        now = _members(found)
        if len(now) == len(before) + add - remove:
            yield f"workers now: {', '.join(map(str, now))}"
            return
        if not is_live(run_dir):
            yield "the run has ended"
            return
        time.sleep(_LOOK_S)
    raise SynclineError(f"The run did not change its workers within {_LIMIT_S:g} s; see {found.events}.")


def _members(run_dir: RunDir) -> list[int]:
    members = list(range(saved_plan(run_dir.read_plan(), run_dir.plan).size))
    for event in run_dir.read_events():
        if isinstance(event, Recovered):
            members = event.members
    return members
