"""Requests from other processes to a running run, such as `syncline workers RUN add 2`.

Here: both ends. A request is a file in the run directory, so file permissions decide who may send one; the coordinator
polls several times a second. Not here: what a request does (`supervision.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from syncline.config.owned_files import check_directory, make_directory, read_owned, replace_file
from syncline.errors import ConfigError
from syncline.telemetry.run_lock import holder_of


class Request(msgspec.Struct, frozen=True):
    """Add or remove workers, or save and stop as Ctrl-C does."""

    add: int = 0
    remove: int = 0
    stop: bool = False


class RequestBox:
    """The coordinator's end. Its folder exists while the run is in progress."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "requests"
        self.open()

    def open(self) -> None:
        """Make the folder, also if it was removed meanwhile; old requests do not count."""
        make_directory(self._folder)
        for old in self._folder.iterdir():
            old.unlink()

    def poll(self) -> list[Request]:
        """The requests since the last call; invalid files are deleted."""
        found = []
        for path in sorted(self._folder.glob("request-*.json")):
            # ConfigError: another user's; the others: not written by `send_request`.
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError):
                found.append(msgspec.json.decode(read_owned(path), type=Request))
            path.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the folder was deleted by hand
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()


def send_request(run_dir: Path, request: Request) -> None:
    """Send a request to the run in this directory; `ConfigError` if it is not in progress, or not ours."""
    if not is_live(run_dir):
        raise ConfigError(
            f"The run in {run_dir} is not in progress. Resume it first: syncline resume {run_dir}",
            code="not-in-progress", run_dir=str(run_dir),
        )  # fmt: skip
    folder = run_dir / "requests"
    check_directory(folder)
    replace_file(folder / f"request-{time.time_ns()}-{os.getpid()}.json", msgspec.json.encode(request))


def is_live(run_dir: Path) -> bool:
    """Whether the run in this directory is in progress."""
    return holder_of(run_dir) is not None
