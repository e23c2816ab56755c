"""Suites of contenders, measured side by side.

Here: `Suite`, `Contender`, `Goal`, and `measure`, which runs the contenders in turn, round after round, and never
one of them many times before the next: what disturbs a machine for a while then disturbs all of them. Not here: the
suites (one file each, by name in `suites.py`), the arithmetic (`statistics.py`), wording (`report.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from syncline.bench.statistics import Spread, paired_ratios, spread

__all__ = ["Contender", "Goal", "Measured", "Outcome", "Settings", "Suite", "SuiteResult", "Verdict", "measure"]

_MOST_FAILURES = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a suite is told when it is made."""

    quick: bool = False
    """Measure less, for a first look: rougher, but every part is run."""
    say: Callable[[str], None] = lambda _: None
    """Tells the user something that is worth knowing while the suite is being prepared."""
    peers_dir: Path | None = None
    """Where the environments of the peers are; None for the usual place."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One side of a comparison."""

    name: str
    measure: Callable[[], float]
    """One measurement, in the suite's unit. What it raises is reported, and the others go on without it."""
    what: str = ""
    """A sentence: what exactly is run."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a contender's ratio to the baseline, or to another contender, is meant to be."""

    contender: str
    limit: float
    bound: Literal["at most", "at least"] = "at most"
    against: str | None = None
    """Another contender to be compared with than the suite's baseline."""

    def holds_for(self, ratio: float) -> bool:
        """Whether this ratio is good enough."""
        return ratio <= self.limit if self.bound == "at most" else ratio >= self.limit


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One thing that is measured, and those who are compared by it."""

    name: str
    measures: str
    """A sentence: what is measured, from where to where."""
    unit: str
    contenders: tuple[Contender, ...]
    baseline: str
    """The contender that the others are compared with."""
    goals: tuple[Goal, ...] = ()
    rounds_per_repeat: int = 1
    """A measurement that takes little time can afford more rounds."""

    def __post_init__(self) -> None:
        names = [c.name for c in self.contenders]
        assert len(set(names)) == len(names), f"suite {self.name}: two contenders have the same name"
        compared = [name for goal in self.goals for name in (goal.contender, goal.against or self.baseline)]
        for name in (self.baseline, *compared):
            assert name in names, f"suite {self.name}: there is no contender {name!r}"


class Measured(NamedTuple):
    """One measurement, as it happens; `round` 0 is the warm-up, whose values are thrown away.

    A contender that is left out has neither value nor failure.
    """

    suite: Suite
    round: int
    rounds: int
    contender: str
    value: float | None
    failure: str | None


@dataclass
class Outcome:
    """What one contender came to: a value for each round, None where there is none."""

    values: list[float | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def is_out(self) -> bool:
        """One failure may be bad luck. A second one ends the contender's part: it may take minutes to fail again."""
        return len(self.failures) >= _MOST_FAILURES


class Verdict(NamedTuple):
    """Whether a goal was met; None if there is nothing to judge by."""

    goal: Goal
    ratio: Spread | None
    rounds_that_agree: int
    is_met: bool | None


@dataclass
class SuiteResult:
    """All measurements of a suite, complete or not."""

    suite: Suite
    rounds: int
    outcomes: dict[str, Outcome]
    is_interrupted: bool = False
    entry: str | None = None
    """The name by which `syncline bench` is asked for it, if it is known: one name may stand for several suites."""

    def spread(self, contender: str) -> Spread | None:
        """Where the contender's values lie."""
        return spread([v for v in self.outcomes[contender].values if v is not None])

    def ratios(self, contender: str, against: str | None = None) -> list[float]:
        """The contender's value over the baseline's, or over that of the one it is set `against`, round by round."""
        return paired_ratios(self.outcomes[contender].values, self.outcomes[against or self.suite.baseline].values)

    def verdicts(self) -> list[Verdict]:
        """How the goals fared. The median of the ratios decides; how many rounds agree with it is told along."""
        verdicts = []
        for goal in self.suite.goals:
            ratios = self.ratios(goal.contender, goal.against)
            found = spread(ratios)
            is_met = goal.holds_for(found.median) if found else None
            agreeing = sum(goal.holds_for(r) is is_met for r in ratios)
            verdicts.append(Verdict(goal, found, agreeing, is_met))
        return verdicts


def measure(suite: Suite, repeats: int, on_measured: Callable[[Measured], None] = lambda _: None) -> SuiteResult:
    """Measure all contenders in turn: A B C, A B C, ..., after one such round to warm up.

    A contender that raises has no value in that round; after a second failure it is left out, and what it measured
    before counts. Ctrl-C ends the measuring, and what there is by then is returned.
    """
    rounds = repeats * suite.rounds_per_repeat
    outcomes = {c.name: Outcome() for c in suite.contenders}
    result = SuiteResult(suite, rounds, outcomes)
    try:
        for number in range(rounds + 1):
            for contender in suite.contenders:
                outcome = outcomes[contender.name]
                value, failure = (None, None) if outcome.is_out else _one(contender)
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


def _one(contender: Contender) -> tuple[float | None, str | None]:
    try:
        return contender.measure(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
