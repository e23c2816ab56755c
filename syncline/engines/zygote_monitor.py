"""When a zygote counts as stuck, and for how long a process has been stopped. Pure; time is passed in as a number.

The owner pings a zygote that is ready, and it answers at once: it does nothing else that takes long. Before that it
imports torch, which may take many seconds, so silence means nothing yet; but a stopped process is stopped in any phase.

Here: `ZygoteMonitor` and `StoppedTime`. Not here: pings and processes (`zygote_process.py`), and what follows
(`local.py`).
"""

from __future__ import annotations

LEAST_SILENCE_S = 2.0
"""An answer that takes less than this is never missing."""
STOPPED_S = 1.0
"""How long a process may be stopped before it counts as stuck."""
PING_EVERY_S = 0.5
_TIMES_LONGEST = 3
_OWN_DELAY_S = 1.0
"""If the owner itself was held up for longer than this, perhaps the whole machine was."""


class StoppedTime:
    """For how long a process has been stopped, if its state is checked several times a second."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._checked_at: float | None = None

    def update(self, now: float, state: str) -> float:
        """The seconds so far; `state` is the kernel's letter for the process."""
        if self._checked_at is not None and now - self._checked_at > _OWN_DELAY_S:
            self._since = None
        self._checked_at = now
        if state != "T":
            self._since = None
        elif self._since is None:
            self._since = now
        return 0.0 if self._since is None else now - self._since


class ZygoteMonitor:
    """`patience`: a factor for the longest silence, larger for the successor of a zygote that was too slow."""

    def __init__(self, now: float, *, patience: float = 1.0) -> None:
        self._patience = patience
        self._is_ready = False
        self._answered_at = self._checked_at = now
        self._pinged_at: float | None = None  # None unless an answer is awaited
        self._stopped = StoppedTime()
        self._longest_s = 0.0

    def on_ready(self, now: float) -> None:
        """It has imported everything, and answers from now on."""
        self._is_ready, self._answered_at = True, now

    def on_answer(self, now: float) -> None:
        if self._pinged_at is not None:
            self._longest_s = max(self._longest_s, min(now - self._pinged_at, LEAST_SILENCE_S))
        self._pinged_at, self._answered_at = None, now

    def wants_ping(self, now: float) -> bool:
        """Whether to send a ping now; True starts to wait for the answer."""
        if not self._is_ready or self._pinged_at is not None or now - self._answered_at < PING_EVERY_S:
            return False
        self._pinged_at = now
        return True

    def why_stuck(self, now: float, state: str) -> str | None:
        """Why it counts as stuck, if it does; `state` is the kernel's letter for its process."""
        delay, self._checked_at = now - self._checked_at, now
        if delay > _OWN_DELAY_S and self._pinged_at is not None:
            self._pinged_at += delay
        if self._stopped.update(now, state) >= STOPPED_S:
            return "it is stopped, as by SIGSTOP"
        limit = max(LEAST_SILENCE_S, _TIMES_LONGEST * self._longest_s) * self._patience
        if self._pinged_at is not None and now - self._pinged_at > limit:
            return f"it has not answered for {now - self._pinged_at:.1f} s"
        return None
