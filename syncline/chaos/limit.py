"""`Limit`: no run is waited for without end. What it ends counts as a hang.

Here: one thread that watches one run of this process. Not here: runs that end by themselves (`attack.py`).
"""

from __future__ import annotations

import os
import signal
import threading
import time

from syncline.chaos.processes import send, zygote_of
from syncline.telemetry.events import CheckpointSaved, Evaluated, Event, Progress, RunEnded, RunStarted, Summary, WentOn
from syncline.view.words import duration

__all__ = ["Limit"]

_LOOK_EVERY_S = 0.2


class Limit:
    """Ends a run that takes longer than `limit_s`, or makes no progress for `hang_s`.

    It ends the process that the run's workers come from: they die with it, and the driver sees that it is gone.
    """

    def __init__(self, *, hang_s: float, limit_s: float) -> None:
        self.why = ""
        """Why the run was ended, in words; empty if it was not."""
        self._hang_s, self._limit_s = hang_s, limit_s
        self._began = self._last_sign = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="syncline-limit", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        """Something happened in the run. Losses are no progress: workers may be lost and started without end."""
        if isinstance(event, RunStarted | Progress | Evaluated | WentOn | CheckpointSaved):
            self._last_sign = time.monotonic()
        elif isinstance(event, Summary | RunEnded):
            self._closed.set()

    def close(self) -> None:
        """The run is over."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now - self._last_sign > self._hang_s:
                self.why = f"It made no progress for {duration(self._hang_s)}."
            elif now - self._began > self._limit_s:
                self.why = f"It took longer than {duration(self._limit_s)}."
            if self.why:
                zygote = zygote_of(os.getpid())
                if zygote is not None:
                    send(zygote, signal.SIGKILL, parent=os.getpid())
                return
