"""A run's directory: where each thing lies, writing events to it and reading them back.

    RUN/plan.json  config.json  events.jsonl  ledger.jsonl  summary.json  predictions.json  task.payload
        logs/worker-0.log  checkpoints/

Here: paths and the event file. Not here: what a checkpoint holds (`checkpoint/`). Reading works on a run that is live,
finished or crashed: a last line that is cut off is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import ConfigError
from syncline.telemetry.events import Event, from_dict, to_line

__all__ = ["EventLog", "RunDir"]


class RunDir:
    """The paths inside a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def existing(cls, path: Path) -> RunDir:
        """The run directory at `path`; `ConfigError` if that is none."""
        if not (path / "plan.json").is_file():
            runs = sorted(p.parent for p in path.glob("*/plan.json"))
            hint = f" There are runs inside it: {', '.join(map(str, runs[-3:]))}." if runs else ""
            raise ConfigError(f"{path} is not a run directory: it has no plan.json.{hint}")
        return cls(path)

    @classmethod
    def new(cls, parent: Path, name: str, *, exact: bool) -> RunDir:
        """A new run directory; a number is added to a name that is taken, unless it must be `exact`."""
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if exact:
                    raise ConfigError(
                        f"{path} exists already. Choose another name, or go on with that run: syncline resume {path}"
                    ) from None
                continue
            except OSError as error:
                raise ConfigError(f"The run directory {path} cannot be made: {error.strerror}.") from error
            return cls(path)
        raise ConfigError(f"{parent} has ten thousand runs named {name}. Choose another name.")

    @staticmethod
    def write(path: Path, data: bytes) -> None:
        """Replace a small file whole."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)

    @property
    def config(self) -> Path:
        """The settings as JSON, for resuming."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The plan as JSON."""
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        """One JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """What became of every sample."""
        return self.path / "ledger.jsonl"

    @property
    def summary(self) -> Path:
        """The last event of a run that reached its end."""
        return self.path / "summary.json"

    @property
    def predictions(self) -> Path:
        """What a classifier got right and wrong on the test data."""
        return self.path / "predictions.json"

    @property
    def payload(self) -> Path:
        """The task, as the workers load it."""
        return self.path / "task.payload"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def log(self, rank: int) -> Path:
        """What worker `rank` printed."""
        return self.path / "logs" / f"worker-{rank}.log"

    def read_plan(self) -> dict[str, Any]:
        """The plan as plain data."""
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
                try:
                    yield from_dict(msgspec.json.decode(line))
                except (msgspec.DecodeError, msgspec.ValidationError):
                    continue


class EventLog:
    """Appends events to a run's event file; each is on its way to the disk when `write` returns."""

    def __init__(self, run_dir: RunDir) -> None:
        _end_last_line(run_dir.events)
        self._file = run_dir.events.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        """One line."""
        self._file.write(to_line(event) + b"\n")

    def close(self) -> None:
        """No more events."""
        self._file.close()


def _end_last_line(path: Path) -> None:
    """A crash may have cut the last line off; what follows must start on a line of its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
