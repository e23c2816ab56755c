"""Who has stopped answering: a pure judge of signs of life.

Every process says several times a second that it lives, from a thread of its own; with it comes how far its main loop
is, and whether that waits for others. A process that says nothing is stopped or gone; one that speaks but whose loop
neither advances nor waits, while others wait, is stuck. What is too long follows from what was seen in this run, not
from settings.

Here: `Watch`. Not here: what is done about it (`supervision.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Watch"]

LEAST_SILENCE_S = 1.5
"""Nobody is thought to be gone sooner, whatever was seen."""
FIRST_WORD_S = 120.0
"""How long a process may take to say its first word: it may have much to load."""
LEAST_STUCK_S = 60.0
"""Nobody is thought to be stuck sooner."""
_TIMES_LONGEST = 3
_STEPS = 100
_OWN_DELAY_S = 0.3
"""If the judge itself was held up for longer than this, so were perhaps all the others."""


@dataclass
class _Signs:
    since: float
    last: float | None = None
    step: int = -1
    advanced: float = 0.0
    waits: bool = False


class Watch:
    """Signs of life of all processes."""

    def __init__(self) -> None:
        self._signs: dict[int, _Signs] = {}
        self._longest_gap = 0.0
        self._times_silent: dict[int, int] = {}
        self._longest_step = 0.0
        self._looked_at: float | None = None

    def on_start(self, number: int, now: float) -> None:
        """A process was started."""
        self._signs[number] = _Signs(now)

    def on_end(self, number: int) -> None:
        """A process has ended."""
        self._signs.pop(number, None)

    def on_sign(self, number: int, step: int, waits: bool, now: float) -> None:
        """A process lives; its loop has done so many steps, or waits for others."""
        signs = self._signs.get(number)
        if signs is None:
            return
        if signs.last is not None and signs.step > 0:  # while it loads, it may be silent for reasons of its own
            self._longest_gap = max(self._longest_gap, min(now - signs.last, LEAST_SILENCE_S))
        if step != signs.step:
            if step == signs.step + 1:
                self._longest_step = max(self._longest_step, now - signs.advanced)
            signs.advanced = now
        if waits:
            signs.advanced = now
        signs.last, signs.step, signs.waits = now, step, waits

    def hung(self, now: float) -> dict[int, str]:
        """Who should be thought of as gone, and why, in words."""
        delay = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        if delay > _OWN_DELAY_S:
            for signs in self._signs.values():
                signs.since += delay
                signs.advanced += delay
                if signs.last is not None:
                    signs.last += delay
        return {number: why for number, signs in self._signs.items() if (why := self._why(number, signs, now))}

    def on_given_up(self, number: int) -> None:
        """It was ended for its silence. If its work makes it silent, its successor must be given more time."""
        self._times_silent[number] = self._times_silent.get(number, 0) + 1

    def _why(self, number: int, signs: _Signs, now: float) -> str | None:
        if signs.last is None:
            limit = FIRST_WORD_S
            return f"did not say a word within {limit:g} s" if now - signs.since > limit else None
        silence = max(LEAST_SILENCE_S, _TIMES_LONGEST * self._longest_gap) * 2 ** self._times_silent.get(number, 0)
        if now - signs.last > silence:
            return f"gave no sign of life for {now - signs.last:.1f} s"
        stuck = max(LEAST_STUCK_S, _STEPS * self._longest_step)
        others_wait = any(s.waits for s in self._signs.values())
        if signs.step >= 0 and not signs.waits and others_wait and now - signs.advanced > stuck:
            return f"did not advance for {now - signs.advanced:.0f} s while others waited for it"
        return None
