"""Suites of contenders, measured side by side.

Here: `Suite`, `Contender`, `Goal`, and `measure`, which runs the contenders in turn, round after round. A contender is
never measured many times before the next one, so that a disturbance of the machine affects all of them. Not here: the
suites (one file each, by name in `suites.py`), the arithmetic (`lab/statistics.py`), text and tables (`report.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from syncline.lab.statistics import Spread, paired_ratios, spread

_MOST_FAILURES = 2


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The options of `syncline bench` that concern a suite."""

    quick: bool = False
    """A first look: fewer and rougher measurements, but every part runs."""
    say: Callable[[str], None] = lambda _: None
    """Reports a message to the user while the suite is being prepared."""
    peers_dir: Path | None = None
    """The folder with the peers' environments; None for the default."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One side of a comparison."""

    name: str
    measure: Callable[[], float]
    """One measurement, in the suite's unit. If it raises, the error is reported and the others continue."""
    what: str = ""
    """A sentence: what exactly runs."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on a contender's ratio to the baseline, or to another contender."""

    contender: str
    limit: float
    bound: Literal["at most", "at least"] = "at most"
    against: str | None = None
    """Compare with this contender instead of the suite's baseline."""

    def holds_for(self, ratio: float) -> bool:
        return ratio <= self.limit if self.bound == "at most" else ratio >= self.limit


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One measurement, and the contenders compared by it."""

    name: str
    measures: str
    """A sentence: what is measured, from when to when."""
    unit: str
    contenders: tuple[Contender, ...]
    baseline: str
    """The contender that the others are compared with."""
    goals: tuple[Goal, ...] = ()
    rounds_per_repeat: int = 1
    """More than 1 for short measurements."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Contenders that cannot be measured here, and why: rows without figures."""

    def __post_init__(self) -> None:
        names = [c.name for c in self.contenders]
        assert len(set(names)) == len(names), f"suite {self.name}: two contenders have the same name"
        compared = [name for goal in self.goals for name in (goal.contender, goal.against or self.baseline)]
        for name in (self.baseline, *compared):
            assert name in names, f"suite {self.name}: there is no contender {name!r}"


class Measured(NamedTuple):
    """One measurement, as it happens; `round` 0 is the warm-up, whose values are discarded.

    A skipped contender has neither value nor failure.
    """

    suite: Suite
    round: int
    rounds: int
    contender: str
    value: float | None
    failure: str | None


@dataclass
class ContenderOutcome:
    """The results of one contender: a value per round, None if there is none."""

    values: list[float | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def is_skipped(self) -> bool:
        """One failure may be an accident. After a second one the contender is skipped: a failure may take minutes."""
        return len(self.failures) >= _MOST_FAILURES


class GoalVerdict(NamedTuple):
    """Whether a goal was met; None without measurements."""

    goal: Goal
    ratio: Spread | None
    rounds_that_agree: int
    is_met: bool | None


@dataclass
class SuiteResult:
    """All measurements of a suite, complete or not."""

    suite: Suite
    rounds: int
    outcomes: dict[str, ContenderOutcome]
    is_interrupted: bool = False
    entry: str | None = None
    """The name given to `syncline bench`, if known: one name may stand for several suites."""

    def spread(self, contender: str) -> Spread | None:
        """The spread of the contender's values."""
        return spread([v for v in self.outcomes[contender].values if v is not None])

    def ratios(self, contender: str, against: str | None = None) -> list[float]:
        """The contender's value divided by that of the baseline, or of `against`, round by round."""
        return paired_ratios(self.outcomes[contender].values, self.outcomes[against or self.suite.baseline].values)

    def verdicts(self) -> list[GoalVerdict]:
        """One per goal. The median of the ratios decides; the number of rounds that agree is reported."""
        verdicts = []
        for goal in self.suite.goals:
            ratios = self.ratios(goal.contender, goal.against)
            found = spread(ratios)
            is_met = goal.holds_for(found.median) if found else None
            agreeing = sum(goal.holds_for(r) is is_met for r in ratios)
            verdicts.append(GoalVerdict(goal, found, agreeing, is_met))
        return verdicts


def measure(suite: Suite, repeats: int, on_measured: Callable[[Measured], None] = lambda _: None) -> SuiteResult:
    """Measure all contenders in turn: A B C, A B C, ..., after one warm-up round.

    A contender that raises has no value in that round. After a second failure it is skipped; its earlier values count.
    Ctrl-C ends the measurements and returns those so far.
    """
    rounds = repeats * suite.rounds_per_repeat
    outcomes = {c.name: ContenderOutcome() for c in suite.contenders}
    result = SuiteResult(suite, rounds, outcomes)
    try:
        for number in range(rounds + 1):
            for contender in suite.contenders:
                outcome = outcomes[contender.name]
                value, failure = (None, None) if outcome.is_skipped else _measure_once(contender)
                if failure is not None:
                    outcome.failures.append(failure)
                if number > 0:
                    outcome.values.append(value)
                on_measured(Measured(suite, number, rounds, contender.name, value, failure))
    except KeyboardInterrupt:
        result.is_interrupted = True
        begun = max(len(o.values) for o in outcomes.values())
        for outcome in outcomes.values():
            outcome.values += [None] * (begun - len(outcome.values))
    return result


def _measure_once(contender: Contender) -> tuple[float | None, str | None]:
    try:
        return contender.measure(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
