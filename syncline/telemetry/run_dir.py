"""A run's directory: its paths, and writing and reading events.

    RUN/plan.json  expected.json  config.json  events.jsonl  ledger.jsonl  summary.json  predictions.json
        centroids.json  task.bin  logs/worker-0.log  checkpoints/

Here: paths and the event file. Not here: the content of checkpoints (`checkpoint/`). Live, finished and crashed runs
can be read: an incomplete last line is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from syncline.config import owned_files
from syncline.data.append_file import AppendFile
from syncline.errors import ConfigError
from syncline.telemetry.events import Event, GroupTrains, from_dict, is_plausible, to_line

_SEAL = "sha256"
"""The key of the checksum in plan.json."""


class RunDir:
    """The paths inside a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"  # the settings, for resuming
        self.plan = path / "plan.json"
        self.expected = path / "expected.json"  # what was predicted of its steps
        self.events = path / "events.jsonl"
        self.ledger = path / "ledger.jsonl"  # which step used each sample
        self.summary = path / "summary.json"  # the Summary event of a completed run
        self.predictions = path / "predictions.json"  # a classifier's, on the test data
        self.centroids = path / "centroids.json"  # pictures of clusters, of models that learn some
        self.task_file = path / "task.bin"  # the serialized task that workers load
        self.checkpoints = path / "checkpoints"

    @classmethod
    def existing(cls, path: Path) -> RunDir:
        """The run directory at `path`, of any owner, for reading; raises ConfigError if it is not one."""
        try:
            is_run = (path / "plan.json").is_file()
        except PermissionError:
            raise _unreadable(path) from None
        if not is_run:
            runs = sorted(p.parent for p in path.glob("*/plan.json"))
            hint = f" It contains these runs: {', '.join(map(str, runs[-3:]))}." if runs else ""
            raise ConfigError(f"{path} is not a run directory: it has no plan.json.{hint}")
        found = cls(path)
        for file in found._files():
            if file.is_symlink():  # said now and once, instead of when it is first opened
                owned_files.open_regular(file).close()
        return found

    @classmethod
    def owned(cls, path: Path) -> RunDir:
        """The run directory at `path`, for resuming and for loading its task, which runs code.

        Raises ConfigError unless the directory and the files in it are ours, because others could have written them.
        """
        if os.path.islink(path) and path.lstat().st_uid in (os.geteuid(), 0):
            path = path.resolve()  # our own link to a run, such as runs/latest
        try:
            if os.path.isdir(path):  # unlike Path.is_dir, False where we may not look
                owned_files.check_directory(path)
        except PermissionError:
            raise _unreadable(path) from None
        found = cls.existing(path)
        for file in found._files():
            with contextlib.suppress(FileNotFoundError):
                owned_files.open_owned(file).close()
        for folder in (found.checkpoints, path / "logs"):
            with contextlib.suppress(FileNotFoundError):
                owned_files.check_directory(folder)
        return found

    @classmethod
    def new(cls, parent: Path, name: str, *, exact: bool, shared: bool = False) -> RunDir:
        """A new run directory; a taken name gets a number appended, unless it must be `exact`.

        Only this user can read it, unless it is `shared`; its files follow (`config/owned_files.py`).
        """
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True, mode=0o755 if shared else 0o700)
            except FileExistsError:
                if exact:
                    raise ConfigError(
                        f"{path} already exists. Choose another name, or resume that run: syncline resume {path}"
                    ) from None
                continue
            except OSError as error:
                raise ConfigError(f"Cannot create the run directory {path}: {error.strerror}.") from error
            return cls(path)
        raise ConfigError(f"{parent} already has 10,000 runs named {name}. Choose another name.")

    @staticmethod
    def write(path: Path, data: bytes) -> None:
        """Replace the file at `path` atomically."""
        owned_files.replace_file(path, data)

    def remove_unfinished(self) -> None:
        """Remove temporary files that a killed driver left. Call it only where no other driver is at work."""
        for file in self._files():
            owned_files.remove_unfinished(file)

    def log(self, worker_id: int) -> Path:
        return self.path / "logs" / f"worker-{worker_id}.log"

    def read_plan(self) -> dict[str, Any]:
        """The plan as written; `ConfigError` if it is no JSON object. `planning/planner.py` checks its fields."""
        try:
            with owned_files.open_regular(self.plan) as file:
                plan = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(self.plan, str(error)) from error
        if not isinstance(plan, dict):
            raise _damaged(self.plan, f"it holds {type(plan).__name__} instead of an object")
        seal = plan.pop(_SEAL, None)
        if seal is not None and seal != _seal_of(plan):
            raise _damaged(self.plan, "its content was changed since it was written")
        if not isinstance(plan.get("workers", []), list):
            raise _damaged(self.plan, "its workers are no list")
        return plan

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write the plan with a checksum, so that a damaged one is never used."""
        self.write(self.plan, json.dumps({**plan, _SEAL: _seal_of(plan)}, indent=1).encode())

    def read_events(self) -> Iterator[Event]:
        """The events so far, oldest first."""
        try:
            file = owned_files.open_regular(self.events)
        except FileNotFoundError:
            return
        with file:
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written, or cut off by a crash
                yield from read_lines([line])

    def has_own_group(self) -> bool:
        """Whether this is the run of a script that trains with torch.distributed itself."""
        return any(isinstance(event, GroupTrains) for event in self.read_events())

    def _files(self) -> list[Path]:
        """What a driver reads, appends to or replaces."""
        return [
            self.config, self.plan, self.expected, self.events, self.ledger, self.summary, self.predictions,
            self.centroids, self.task_file,
        ]  # fmt: skip


def _unreadable(path: Path) -> ConfigError:
    return ConfigError(
        f"You may not read {path}. A run is readable by its user alone, unless it was started with --shared. Ask that "
        f"user to make it readable: chmod -R go+rX {path}",
        code="unreadable-run", path=str(path),
    )  # fmt: skip


def _seal_of(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def read_lines(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events in these lines, without those that cannot be read."""
    for line in lines:
        # A line that is nested too deeply was not written by a run.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = from_dict(msgspec.json.decode(line))
            if is_plausible(event):
                yield event


class EventLog:
    """Appends events to a run's event file, unbuffered."""

    def __init__(self, run_dir: RunDir) -> None:
        self._file = AppendFile(run_dir.events)

    def write(self, event: Event) -> None:
        self._file.write(to_line(event))

    def follow(self) -> None:
        """Continue by the file's path if it was removed or replaced."""
        self._file.follow()

    def close(self) -> None:
        self._file.close()


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {why}. The run directory is damaged: restore the file, or start a new run.",
        code="damaged-plan",
        path=str(path),
    )
