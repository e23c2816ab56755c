"""Every exception Syncline raises on purpose.

    SynclineError
    ├── ConfigError        a setting is invalid (also a ValueError)
    │   ├── UnknownName    a name or option that does not exist; carries the nearest ones
    │   └── ConfigFileError  the same, in a file: path, line and key
    ├── DataError          a data file is missing, corrupt or does not fit the task
    ├── CheckpointError    a checkpoint cannot be written, found or trusted
    ├── ExportError        a model cannot be exported, or the exported one is not equal to it
    ├── NonFiniteLoss      the loss became NaN or infinite and the policy is to stop
    ├── PeerFailed         an exchange broke because another worker failed; never the first cause
    └── WorkerFailed       a run ended because a worker failed; carries the root cause
    Interrupted            Ctrl-C, after the work was saved (a KeyboardInterrupt)

A message says what happened, why, and what to do, with the values in it. Its wording may change; programs and tests
rely on the type, on the stable `code`, and on `facts`, the values by name. Exceptions cross processes, so each can be
rebuilt from its message and its attributes alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConfigFileError",
    "DataError",
    "ExportError",
    "Interrupted",
    "NonFiniteLoss",
    "PeerFailed",
    "SynclineError",
    "UnknownName",
    "WorkerFailed",
    "check_options",
    "did_you_mean",
    "nearest",
    "plural",
]


SCRIPT_EXIT = "script-exit"
"""The code of the error, and the reason in `RunEnded`, if a script refused its arguments and printed why."""

ANOTHER_MODEL = "checkpoint-of-another-model"
"""The code of the error if a checkpoint does not fit the task."""


class _Coded(BaseException):
    """An exception with a stable code and its values by name."""

    code: str
    """Identifies the problem, such as `unknown-name`; a type has one, and a raise site may give a finer one."""
    facts: dict[str, Any]
    """The values that the message shows, such as the setting, the worker, the step, the allowed values."""

    def __init__(self, message: str = "", *, code: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.code = code or _dashed(type(self).__name__)
        self.facts = facts


class SynclineError(_Coded, Exception):
    """The root of everything Syncline raises on purpose."""


class ConfigError(SynclineError, ValueError):
    """A setting is invalid; the message names it, its value and what is allowed."""

    @classmethod
    def for_setting(cls, setting: str, value: object, must_be: str, **facts: Any) -> ConfigError:
        """The error for a setting with an invalid value.

        >>> print(ConfigError.for_setting("workers", 0, "1 or more"))
        workers is 0, but must be 1 or more.
        """
        message = f"{setting} is {value!r}, but must be {must_be}."
        return cls(message, code="invalid-setting", setting=setting, value=value, **facts)


class UnknownName(ConfigError):
    """A name or option that does not exist.

    >>> raise UnknownName.among("model", "lenett", ["lenet", "mlp"])  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    UnknownName: There is no model 'lenett'. Did you mean 'lenet'? Known: lenet, mlp.
    """

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], *, more: str = "") -> UnknownName:
        """The error for `name`, with the nearest of the `known` names and, if they are few, all of them."""
        names = sorted(set(known))
        sentences = [f"There is no {kind} {name!r}.", did_you_mean(name, names), more]
        return cls(" ".join(filter(None, sentences)), kind=kind, name=name, nearest=nearest(name, names), known=names)

    @classmethod
    def option(cls, owner: str, name: str, known: Iterable[str], *, kind: str = "option") -> UnknownName:
        """The error for an option `name` that `owner` does not have.

        >>> print(UnknownName.option("sgd", "momentun", ["lr", "momentum"]))
        sgd has no option 'momentun'. Did you mean 'momentum'? Known: lr, momentum.
        """
        names = list(known)
        hint = did_you_mean(name, names) or "It has none."
        return cls(
            f"{owner} has no {kind} {name!r}. {hint}",
            code="unknown-option", owner=owner, kind=kind, name=name, nearest=nearest(name, names), known=names,
        )  # fmt: skip


class ConfigFileError(ConfigError):
    """A mistake in a run file; the message starts with `path:line:` so that editors can jump there."""

    @classmethod
    def at(cls, path: Path, line: int | None, problem: str | ConfigError) -> ConfigFileError:
        """The error for a `problem` found in `path` at `line` (if the line is known); an error brings its facts."""
        where = f"{path}:{line}" if line is not None else str(path)
        code, facts = (problem.code, problem.facts) if isinstance(problem, ConfigError) else (None, {})
        return cls(f"{where}: {problem}", code=code, **{**facts, "path": str(path), "line": line})


class DataError(SynclineError):
    """A data file is missing, corrupt or does not fit the task."""


class CheckpointError(SynclineError):
    """A checkpoint cannot be written, found or trusted."""


class ExportError(SynclineError):
    """A model cannot be exported, or the exported one differs from it by more than allowed."""


class NonFiniteLoss(SynclineError):
    """The loss became NaN or infinite; the message names worker, step and samples."""


class PeerFailed(SynclineError):
    """An exchange could not finish because another worker failed or the run was aborted. Never the first cause."""


class WorkerFailed(SynclineError):
    """A run ended because a worker failed. The message is the root cause.

    Its facts: `worker_id`, `name`, `step`; for an exception `exception` and `samples`, otherwise `signal`, `exit_code`
    and `hung`; and `run_dir`, `checkpoint` and `resume_command`.
    """


class Interrupted(_Coded, KeyboardInterrupt):
    """The user stopped the run. Its facts: `run_dir`, `resume_command`, and `step` or `checkpoint`."""


def _dashed(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names closest to `name`, best first; empty if none is close."""
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.6)
    return [by_lower[f] for f in found]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint after an unknown `name`: the nearest known names and, if they are few, all of them.

    >>> did_you_mean("lenett", ["lenet", "mlp"])
    "Did you mean 'lenet'? Known: lenet, mlp."
    """
    names = list(known)
    close = nearest(name, names)
    hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
    # Without a near name a longer list still helps; thousands of names (timm's models) never do.
    listed = f"Known: {', '.join(names)}." if 0 < len(names) <= (20 if close else 60) else ""
    return f"{hint} {listed}".strip()


def check_options(owner: str, given: Iterable[str], known: Iterable[str], *, kind: str = "option") -> None:
    """Raise `UnknownName` for the first of the `given` options that `owner` does not have."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UnknownName.option(owner, name, names, kind=kind)


def plural(count: float, noun: str, nouns: str = "") -> str:
    """The count with its noun, for messages.

    >>> plural(1, "worker"), plural(1500, "step"), plural(2, "process", "processes")
    ('1 worker', '1,500 steps', '2 processes')
    """
    shown = f"{count:,}" if isinstance(count, int) else f"{count:.4g}"
    return f"{shown} {noun if count == 1 else nouns or noun + 's'}"
