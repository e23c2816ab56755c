"""A run's directory: its paths, and writing and reading events.

    RUN/plan.json  config.json  events.jsonl  ledger.jsonl  summary.json  predictions.json  task.bin
        logs/worker-0.log  checkpoints/

Here: paths and the event file. Not here: the content of checkpoints (`checkpoint/`). Live, finished and crashed runs
can be read: an incomplete last line is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from syncline.data.append_file import AppendFile
from syncline.errors import ConfigError
from syncline.telemetry.events import Event, from_dict, to_line


class RunDir:
    """The paths inside a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"  # the settings, for resuming
        self.plan = path / "plan.json"
        self.events = path / "events.jsonl"
        self.ledger = path / "ledger.jsonl"  # which step used each sample
        self.summary = path / "summary.json"  # the Summary event of a completed run
        self.predictions = path / "predictions.json"  # a classifier's, on the test data
        self.task_file = path / "task.bin"  # the serialized task that workers load
        self.checkpoints = path / "checkpoints"

    @classmethod
    def existing(cls, path: Path) -> RunDir:
        """The run directory at `path`; raises ConfigError if it is not one."""
        if not (path / "plan.json").is_file():
            runs = sorted(p.parent for p in path.glob("*/plan.json"))
            hint = f" It contains these runs: {', '.join(map(str, runs[-3:]))}." if runs else ""
            raise ConfigError(f"{path} is not a run directory: it has no plan.json.{hint}")
        return cls(path)

    @classmethod
    def new(cls, parent: Path, name: str, *, exact: bool) -> RunDir:
        """A new run directory; a taken name gets a number appended, unless it must be `exact`."""
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
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
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)

    def log(self, worker_id: int) -> Path:
        return self.path / "logs" / f"worker-{worker_id}.log"

    def read_plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(self.plan.read_text())
        return plan

    def read_events(self) -> Iterator[Event]:
        """The events so far, oldest first."""
        if not self.events.exists():
            return
        with self.events.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written, or cut off by a crash
                yield from read_lines([line])


def read_lines(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events in these lines, without those that cannot be read."""
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            yield from_dict(msgspec.json.decode(line))


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
