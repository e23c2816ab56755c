"""`Admission`: whether a queue takes another request, or the client learns at once that the server is busy.

A burst may wait: for the limit that the user set. A queue that stands is no burst: more comes than can be answered, and
waiting only makes every answer late. From then on a request is taken only if it waits for less than one run, until no
request had to be refused for a while. Pure: times in, decisions out. Not here: the queue (`batching.py`).
"""

from __future__ import annotations

__all__ = ["Admission"]

_BURST_S = 0.1
"""A queue in which requests have waited too long for this time stands."""
_CALM_S = 1.0
"""Shedding ends when no request was refused for this time."""
_SHARE_OF_RUN = 0.6
"""The wait while shedding. With its own run, and with what refusing the others takes from it, a request then takes less
than twice the time of one that never waits."""
_SHORT_WAIT_S = 0.005
"""A wait that is never too long, so that a few connections to a quick model are never refused."""
_NEWEST = 0.1
"""The weight of the newest time in the moving average."""


class Admission:
    """The state of one queue. All times are of one clock, in seconds."""

    def __init__(self, run_s: float) -> None:
        self.run_s = run_s
        """The time of the engine for one request, as a moving average. 0 if unknown."""
        self.row_s = run_s
        """The same for one row: requests differ in size."""
        self._quickest_s = run_s
        """The time of a row without other programs on the processor: the shortest so far. 0 if unknown."""
        self._late_since: float | None = None
        self._sheds_until = float("-inf")

    @property
    def short_wait_s(self) -> float:
        return max(_SHORT_WAIT_S, _SHARE_OF_RUN * self.run_s)

    def on_run(self, now: float, waited_s: float) -> None:
        """A run begins, and its first request has waited this long."""
        if waited_s <= self.short_wait_s:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now

    def on_ran(self, seconds: float, requests: int, rows: int) -> None:
        """A run of these requests, with so many rows, took this long."""
        self.run_s = _moved(self.run_s, seconds / requests)
        self.row_s = _moved(self.row_s, seconds / rows)
        self._quickest_s = min(self._quickest_s or seconds / rows, seconds / rows)

    def on_idle(self) -> None:
        """Nothing is queued or running."""
        self._late_since = None

    def admits(self, now: float, wait_s: float, longest_wait_s: float, rows_ahead: int) -> bool:
        """Whether to take a request that would wait for `wait_s`, behind so many rows.

        A burst may wait for `longest_wait_s`.
        """
        if self._late_since is not None and now - self._late_since >= _BURST_S:
            self._sheds_until = now + _CALM_S
        if now >= self._sheds_until:
            return wait_s <= longest_wait_s
        if wait_s <= min(self.short_wait_s, longest_wait_s):
            return True
        # A few requests to a quick model wait for long only if other programs take the processor. Refusing them would
        # not make the others quicker.
        if 0 < rows_ahead * self._quickest_s <= min(_SHORT_WAIT_S, longest_wait_s):
            return True
        self._sheds_until = now + _CALM_S
        return False


def _moved(average: float, newest: float) -> float:
    return average + _NEWEST * (newest - average) if average else newest
