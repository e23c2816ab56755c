"""The decision on a canary: pure, from the requests that both versions have answered, and the labels that came back.

Here: which request goes to the canary, and whether it does worse. Not here: carrying it out (`rollout.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["AnswerStats", "Canary", "worse_because"]

FEWEST = 20
"""No decision before this many answers of each version."""
_RECENT = 200
_ERROR_MARGIN = 0.02
_LATENCY_RATIO = 1.5
_LATENCY_MARGIN_S = 0.001
"""Below this difference latency is noise."""
_ACCURACY_MARGIN = 0.01
_ACCURACY_DEVIATIONS = 4.0
"""The difference in accuracy, in standard deviations of what chance does to it. It is looked at with every label, which
gives chance many tries: with 3, up to 4% of canaries that were as good as the stable version were rolled back within
5,000 simulated labels, with 4 at most 0.5%."""


@dataclass
class AnswerStats:
    """What one version has answered."""

    count: int = 0
    errors: int = 0
    labels: int = 0
    """Predictions whose label came back."""
    right: int = 0
    """Those of them that were right."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, seconds: float, *, is_error: bool) -> None:
        self.count += 1
        self.errors += is_error
        if not is_error:
            self.seconds.append(seconds)

    def add_labels(self, outcomes: Sequence[bool]) -> None:
        self.labels += len(outcomes)
        self.right += sum(outcomes)

    @property
    def accuracy(self) -> float:
        return self.right / self.labels if self.labels else 0.0

    @property
    def error_rate(self) -> float:
        return self.errors / self.count if self.count else 0.0


def worse_because(stable: AnswerStats, canary: AnswerStats) -> str | None:
    """Why the canary does worse than the stable version; None if it does not, or if it is too early to say."""
    return _worse_answers(stable, canary) or _worse_accuracy(stable, canary)


def _worse_accuracy(stable: AnswerStats, canary: AnswerStats) -> str | None:
    if canary.labels < FEWEST or stable.labels < FEWEST:
        return None
    # The usual test of two shares. One right and one wrong answer more keep its deviation above 0.
    share = (stable.right + canary.right + 1) / (stable.labels + canary.labels + 2)
    deviation = math.sqrt(share * (1 - share) * (1 / stable.labels + 1 / canary.labels))
    if stable.accuracy - canary.accuracy <= max(_ACCURACY_MARGIN, _ACCURACY_DEVIATIONS * deviation):
        return None
    return (
        f"{canary.accuracy:.1%} of its {canary.labels:,} predictions with labels are right, against "
        f"{stable.accuracy:.1%} of {stable.labels:,}"
    )


def _worse_answers(stable: AnswerStats, canary: AnswerStats) -> str | None:
    if canary.count < FEWEST or stable.count < FEWEST:
        return None
    if canary.errors > 1 and canary.error_rate > 2 * stable.error_rate + _ERROR_MARGIN:
        return f"{canary.error_rate:.1%} of its answers are errors, against {stable.error_rate:.1%}"
    if min(len(canary.seconds), len(stable.seconds)) < FEWEST:
        return None
    slow, usual = statistics.median(canary.seconds), statistics.median(stable.seconds)
    if slow > _LATENCY_RATIO * usual + _LATENCY_MARGIN_S:
        return f"its median latency is {1e3 * slow:.1f} ms, against {1e3 * usual:.1f} ms"
    return None


class Canary:
    """Divides the requests between the stable version and the canary, exactly in the given share."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.stable, self.canary = AnswerStats(), AnswerStats()
        self._due = 0.0

    def takes_next(self) -> bool:
        """Whether the next request goes to the canary."""
        self._due += self.share
        if self._due < 1 - 1e-9:
            return False
        self._due -= 1
        return True

    def observe(self, seconds: float, *, is_canary: bool, is_error: bool) -> str | None:
        """Count an answer. The reason to roll back, if there is one now."""
        (self.canary if is_canary else self.stable).add(seconds, is_error=is_error)
        # The median is not free: look at every tenth answer of the canary, and at every error of it.
        if is_canary and (is_error or self.canary.count % 10 == 0):
            return worse_because(self.stable, self.canary)
        return None

    def observe_labels(self, outcomes: Sequence[bool], *, is_canary: bool) -> str | None:
        """Count predictions whose labels came back. The reason to roll back, if there is one now."""
        (self.canary if is_canary else self.stable).add_labels(outcomes)
        return worse_because(self.stable, self.canary)
