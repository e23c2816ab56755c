"""Every exception Syncline raises on purpose.

    SynclineError
    ├── ConfigError        a setting is wrong (also a ValueError)
    │   ├── UnknownName    a name nobody knows; carries the nearest ones
    │   └── ConfigFileError  the same, in a file: path, line and key
    ├── DataError          a data file is missing, corrupt or does not fit the task
    ├── CheckpointError    a checkpoint cannot be written, found or trusted
    ├── NonFiniteLoss      the loss became NaN or infinite and the policy is to stop
    ├── PeerLost           another worker is gone; a consequence, never the first cause
    └── WorkerFailed       a run ended because of one worker; carries the first cause
    Interrupted            Ctrl-C, after the work was saved (a KeyboardInterrupt)

A message says what happened, why, and what to do, with the values in it. Exceptions travel between
processes, so each one is rebuilt from its message and its attributes alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConfigFileError",
    "DataError",
    "Interrupted",
    "NonFiniteLoss",
    "PeerLost",
    "SynclineError",
    "UnknownName",
    "WorkerFailed",
    "nearest",
]


class SynclineError(Exception):
    """The root of everything Syncline raises on purpose."""


class ConfigError(SynclineError, ValueError):
    """A setting is wrong; the message names it, its value and what is allowed."""


class UnknownName(ConfigError):
    """A name that no registry knows.

    >>> raise UnknownName.among("model", "lenett", ["lenet", "mlp"])  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    UnknownName: There is no model 'lenett'. Did you mean 'lenet'? Known: lenet, mlp.
    """

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], *, more: str = "") -> UnknownName:
        """The error for `name`, with the nearest of the `known` names and, if they are few, all of them."""
        names = sorted(set(known))
        close = nearest(name, names)
        sentences = [f"There is no {kind} {name!r}."]
        if close:
            sentences.append(f"Did you mean {' or '.join(repr(n) for n in close)}?")
        if 0 < len(names) <= 20:
            sentences.append(f"Known: {', '.join(names)}.")
        if more:
            sentences.append(more)
        return cls(" ".join(sentences))


class ConfigFileError(ConfigError):
    """A mistake in a run file; the message starts with `path:line:` so that editors can jump there."""

    @classmethod
    def at(cls, path: Path, line: int | None, message: str) -> ConfigFileError:
        """The error for `message` found in `path` at `line` (if the line is known)."""
        where = f"{path}:{line}" if line is not None else str(path)
        return cls(f"{where}: {message}")


class DataError(SynclineError):
    """A data file is missing, corrupt or does not fit the task."""


class CheckpointError(SynclineError):
    """A checkpoint cannot be written, found or trusted."""


class NonFiniteLoss(SynclineError):
    """The loss became NaN or infinite; the message names worker, step and samples."""


class PeerLost(SynclineError):
    """Another worker went away in the middle of an exchange. A consequence, never the first cause."""


class WorkerFailed(SynclineError):
    """A run ended because of one worker. The message is the first cause, whole."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run. Its work was saved; the message says where and how to go on."""


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names closest to `name`, best first; empty if none is close."""
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.6)
    return [by_lower[f] for f in found]
