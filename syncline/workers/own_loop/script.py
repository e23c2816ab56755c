"""How a script ends, other than by reaching its last line.

Here: the exceptions that unwind a user's script, and the error for a script that refused its arguments. Not here:
running the script (`workers/entry.py`).

They derive from SystemExit, which no `except Exception` in the user's code catches.
"""

from __future__ import annotations

import os
import stat
import sys

from syncline.errors import SCRIPT_EXIT, ConfigError

_MOST_PRINTED_BYTES = 4_000


class LoopStopped(SystemExit):
    """All workers have agreed to stop; the work is saved."""


class LoopRestarted(SystemExit):
    """The members go back to a checkpoint: the script is restarted in this process."""


class LoopLeft(SystemExit):
    """This worker is no longer a member."""


class Printed:
    """What this process has printed since: a worker's standard error is its log."""

    def __init__(self) -> None:
        log = os.fstat(2)
        self._start = log.st_size if stat.S_ISREG(log.st_mode) else None  # a pipe cannot be read again

    def text(self) -> str:
        if self._start is None:
            return ""
        sys.stdout.flush()
        sys.stderr.flush()
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(self._start)
            return log.read(_MOST_PRINTED_BYTES).decode(errors="replace").strip()


def refused_arguments(printed: Printed) -> ConfigError:
    """The error for a script that exited with code 2 before its first step, as argparse does: what it printed."""
    message = printed.text() or "The script exited with code 2 before its first step: it refused its arguments."
    return ConfigError(message, code=SCRIPT_EXIT, exit_code=2)


def script_failed(exit_code: object) -> RuntimeError:
    return RuntimeError(f"The script ended with exit code {exit_code}.")
