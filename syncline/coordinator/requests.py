"""Wishes of other processes to a run that is under way: `syncline workers RUN add 2`.

Here: both ends of it. A wish is a file in the run directory, so whoever may write there may wish, and nobody else; the
coordinator looks several times a second. Not here: what becomes of it (`supervision.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from syncline.errors import ConfigError

__all__ = ["RequestBox", "Wish", "is_live", "wish"]


class Wish(msgspec.Struct, frozen=True):
    """To have more or fewer workers, or to end with everything saved, as with Ctrl-C."""

    add: int = 0
    remove: int = 0
    stop: bool = False


class _Owner(msgspec.Struct, frozen=True):
    """The process that answers: a number can be given to another process, together with its start it cannot."""

    pid: int
    started: str


class RequestBox:
    """The coordinator's end: it exists while the run is under way."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "requests"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for old in self._folder.iterdir():
            old.unlink()
        self._write_owner()

    def poll(self) -> list[Wish]:
        """The wishes since the last call; what makes no sense is thrown away."""
        found = []
        for path in sorted(self._folder.glob("wish-*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=Wish))
            path.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        """Nobody answers any more."""
        with contextlib.suppress(OSError):  # somebody was tidier
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()

    def _write_owner(self) -> None:
        owner = _Owner(os.getpid(), _start_of(os.getpid()) or "")
        (self._folder / "owner.json").write_bytes(msgspec.json.encode(owner))


def wish(run_dir: Path, what: Wish) -> None:
    """Leave a wish for the run in this directory; `ConfigError` if nobody would answer."""
    if not is_live(run_dir):
        raise ConfigError(f"{run_dir} is not under way now. Go on with it first: syncline resume {run_dir}")
    folder = run_dir / "requests"
    name = f"{time.time_ns()}-{os.getpid()}.json"
    (folder / f".{name}").write_bytes(msgspec.json.encode(what))
    os.replace(folder / f".{name}", folder / f"wish-{name}")


def is_live(run_dir: Path) -> bool:
    """Whether the run in this directory is under way on this machine."""
    try:
        owner = msgspec.json.decode((run_dir / "requests" / "owner.json").read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return False
    return _start_of(owner.pid) == owner.started


def _start_of(pid: int) -> str | None:
    try:
        # The name in parentheses may hold anything; the start is the 20th field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
