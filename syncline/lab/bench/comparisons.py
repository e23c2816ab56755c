"""Ratios in sentences: "1.9 times as fast as gloo (1.8–2.0, 5 of 5 rounds)".

Here: whether more or less of a unit is better, and the text of a ratio and of a goal. Pure functions. Not here: the
figures (`lab/statistics.py`), tables and pages (`report.py`, `html.py`).
"""

from __future__ import annotations

from typing import Literal

from syncline.lab.bench.harness import Goal, GoalVerdict, Suite
from syncline.lab.statistics import Spread

_TIMES = ("µs", "ms", "s", "min")


def better(suite: Suite) -> Literal["less", "more"] | None:
    """Which values are better, by the unit or else by the goals; None if unknown."""
    if suite.unit in _TIMES:
        return "less"
    if _is_rate(suite.unit):
        return "more"
    bounds = {goal.bound for goal in suite.goals}
    return None if len(bounds) != 1 else "less" if bounds == {"at most"} else "more"


def describe_finding(suite: Suite, verdict: GoalVerdict) -> str:
    """The measured ratio, and how many rounds agree with the verdict."""
    goal, ratio = verdict.goal, verdict.ratio
    if ratio is None:
        return f"no round measured both {goal.contender} and {goal.against or suite.baseline}"
    agreeing = f"{verdict.rounds_that_agree} of {ratio.count} round{'s' * (ratio.count != 1)}"
    return comparison(ratio, suite.unit, goal.against or suite.baseline, agreeing)


def comparison(ratio: Spread, unit: str, against: str, agreeing: str = "") -> str:
    """A median ratio with its range."""
    also = f", {agreeing}" if agreeing else ""
    if unit in _TIMES and 0 < ratio.median < 1:
        # 0.5 times the time is twice as fast; the upper end of one range is the lower end of the other.
        fastest = factor(1 / ratio.low) if ratio.low > 0 else "∞"
        between = range_of(factor(1 / ratio.high), fastest)
        return f"{factor(1 / ratio.median)} times as fast as {against} ({between}{also})"
    between = range_of(factor(ratio.low), factor(ratio.high))
    return f"{factor(ratio.median)} {_relation(unit)} {against} ({between}{also})"


def describe_goal(suite: Suite, goal: Goal) -> str:
    """The bound of a goal, without its contender."""
    against = goal.against or suite.baseline
    is_time = suite.unit in _TIMES
    opposite = "at least" if goal.bound == "at most" else "at most"
    if goal.limit == 1 and (is_time or _is_rate(suite.unit)):
        return f"{opposite if is_time else goal.bound} as fast as {against}"
    if is_time and 0 < goal.limit < 1:
        return f"{opposite} {_plain(1 / goal.limit)} times as fast as {against}"
    return f"{goal.bound} {_plain(goal.limit)} {_relation(suite.unit)} {against}"


def factor(value: float) -> str:
    """A ratio with as many digits as a noisy measurement justifies: `0.0521`, `1.07`, `12.3`, `1,204`."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) < 0.995:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"


def range_of(low: str, high: str) -> str:
    """`1.8–2.0`, or `-2 to -1`, which would be hard to read with a dash."""
    return f"{low} to {high}" if "-" in low + high else f"{low}–{high}"


def _relation(unit: str) -> str:
    if unit in _TIMES:
        return "times as long as"
    return "times as fast as" if _is_rate(unit) else "times"


def _is_rate(unit: str) -> bool:
    return unit.endswith("/s")


def _plain(limit: float) -> str:
    return f"{limit:.4g}"
