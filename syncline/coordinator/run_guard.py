"""Watching over the run directory while the run is in progress.

Here: `RunGuard`, which notices that the directory was removed or moved, and that another driver has taken over. Not
here: the lock itself (`telemetry/run_lock.py`) and what the directory holds (`driver.py`, which restores it).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from syncline.errors import ConfigError, SynclineError
from syncline.telemetry.run_dir import RunDir
from syncline.telemetry.run_lock import DriverLock, Holder

_CHECK_EVERY_S = 1.0


class RunGuard:
    """Checks once a second; `restore` writes the files of a directory that is gone."""

    def __init__(self, run_dir: RunDir, lock: DriverLock, restore: Callable[[], None]) -> None:
        self._run_dir, self._lock, self._restore = run_dir, lock, restore
        self._identity = os.stat(run_dir.path)
        self._checked_at = 0.0

    def check(self, now: float) -> bool:
        """Whether the directory was gone and has been restored. `SynclineError` if it cannot be, or is not ours now."""
        if now - self._checked_at < _CHECK_EVERY_S:
            return False
        self._checked_at = now
        was_gone = not self._is_in_place()
        if was_gone:
            try:
                self._restore()
                self._identity = os.stat(self._run_dir.path)
            except OSError as error:
                raise SynclineError(
                    f"The run directory {self._run_dir.path} was removed during training, and cannot be written again: "
                    f"{error.strerror}. The run was ended, because nothing could be saved.",
                    code="run-dir-gone", run_dir=str(self._run_dir.path),
                ) from error  # fmt: skip
        with contextlib.suppress(ConfigError):  # the directory is being removed just now
            if (holder := self._lock.lost_to()) is not None:
                raise self._taken_over(holder)
        return was_gone

    def _is_in_place(self) -> bool:
        """Whether the directory is the same one, and not emptied."""
        with contextlib.suppress(OSError):
            is_same = os.path.samestat(os.stat(self._run_dir.path), self._identity)
            return is_same and self._run_dir.plan.exists()
        return False

    def _taken_over(self, holder: Holder) -> SynclineError:
        return SynclineError(
            f"Another driver ({holder}) has taken over the run {self._run_dir.path}: its lock file was deleted. This "
            "driver stopped without saving, so that the two do not mix; `syncline audit` will report both.",
            code="taken-over", run_dir=str(self._run_dir.path), pid=holder.pid, host=holder.host,
        )  # fmt: skip
