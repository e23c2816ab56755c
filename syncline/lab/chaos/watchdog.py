"""`Watchdog`: ends a run that hangs.

Here: one thread that watches one run of this process. Not here: runs that fail by themselves (`runs.py`).
"""

from __future__ import annotations

import os
import signal
import threading
import time

from syncline.lab.chaos.processes import send, zygote_of
from syncline.observe.formatting import duration
from syncline.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Progress,
    Recovered,
    RunEnded,
    RunStarted,
    Summary,
)

_POLL_S = 0.2


class Watchdog:
    """Ends a run that takes longer than `limit_s`, or makes no progress for `hang_s`.

    It ends the zygote from which the workers are forked: they die with it, and the driver fails the run. It asks by
    SIGTERM: a zygote that is killed otherwise is replaced.
    """

    def __init__(self, *, hang_s: float, limit_s: float) -> None:
        self.reason = ""
        """Why the watchdog ended the run; empty if it did not."""
        self._hang_s, self._limit_s = hang_s, limit_s
        self._began = self._last_progress = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="syncline-limit", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        """Worker failures and restarts are no progress: they could repeat forever."""
        if isinstance(event, RunStarted | Progress | Evaluated | Recovered | CheckpointSaved):
            self._last_progress = time.monotonic()
        elif isinstance(event, Summary | RunEnded):
            self._closed.set()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            if now - self._last_progress > self._hang_s:
                self.reason = f"No progress for {duration(self._hang_s)}."
            elif now - self._began > self._limit_s:
                self.reason = f"The run took longer than {duration(self._limit_s)}."
            if self.reason:
                zygote = zygote_of(os.getpid())
                if zygote is not None:
                    send(zygote, signal.SIGTERM, parent=os.getpid())
                return
