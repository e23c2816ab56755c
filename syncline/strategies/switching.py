"""`Switching`: one strategy after another in one run.

Here: the type and its text form. A warm-up in full precision, say, before gradients are compressed:

    allreduce until epoch 1, then allreduce + onebit until step 5000, then sparknet(10)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from syncline.errors import ConfigError, UnknownName
from syncline.strategies.answers import quoted
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.methods.switching import MethodPhase, SwitchingMethod
from syncline.strategies.own import Own
from syncline.strategies.strategy import Strategy

__all__ = ["AnyStrategy", "Phase", "Single", "Switching", "Until"]

Single = Strategy | Hierarchy | Own
"""A strategy that can be one phase of several."""

_UNITS = ("epoch", "step")


@dataclass(frozen=True)
class Until:
    """Up to and with an epoch or a step of the run, counted from 1: `until epoch 1` is the whole first epoch."""

    unit: Literal["epoch", "step"]
    number: int

    def __post_init__(self) -> None:
        if self.unit not in _UNITS:
            raise UnknownName.among(
                "unit of time", str(self.unit), _UNITS, more="Write 'until epoch 1' or 'until step 500', for example."
            )
        if isinstance(self.number, bool) or not isinstance(self.number, int) or self.number < 1:
            raise ConfigError(
                f"until {self.unit} {self.number}: the number must be 1 or more, for {self.unit}s are counted from 1."
            )

    def __str__(self) -> str:
        return f"until {self.unit} {self.number}"


@dataclass(frozen=True)
class Phase:
    """A strategy, and how long it lasts."""

    strategy: Single
    until: Until

    def __post_init__(self) -> None:
        _check_kind(self.strategy)
        if not isinstance(self.until, Until):
            raise ConfigError(
                f"Phase(until={self.until!r}): write how long it lasts as Until('epoch', 1), for example."
            )

    def __str__(self) -> str:
        return f"{self.strategy} {self.until}"


@dataclass(frozen=True)
class Switching:
    """Phases, each with its strategy, and the strategy of all that comes after them."""

    phases: tuple[Phase, ...]
    last: Single

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise ConfigError(f"A switch needs a strategy to switch from. Use {quoted(str(self.last))} alone.")
        for phase in self.phases:
            if not isinstance(phase, Phase):
                raise ConfigError(f"{phase!r} is no phase. Write Phase(strategy, Until('epoch', 1)), for example.")
        _check_kind(self.last)
        for unit in _UNITS:
            numbers = [phase.until.number for phase in self.phases if phase.until.unit == unit]
            for before, after in itertools.pairwise(numbers):
                if after <= before:
                    raise ConfigError(
                        f"The phase until {unit} {after} comes after the one until {unit} {before}, so it would be "
                        f"over before it begins. Put them in order, or write 'until {unit} {before + 1}' or later."
                    )
        competing = [strategy for strategy in self.strategies if strategy.method.competes]
        if competing and len(competing) < len(self.strategies):
            raise ConfigError(
                "Competing models are each worker's own, and other strategies continue from one shared model: "
                f"switching between the two would discard all models but one. Use "
                f"{quoted(str(competing[0]))} for the whole run, or the others without it.",
                code="cannot-switch", strategy=str(competing[0]),
            )  # fmt: skip

    @property
    def strategies(self) -> tuple[Single, ...]:
        """All of them, in order."""
        return (*(phase.strategy for phase in self.phases), self.last)

    @property
    def method(self) -> SwitchingMethod:
        ended = [MethodPhase(p.strategy.method, str(p.strategy), p.until.unit, p.until.number) for p in self.phases]
        return SwitchingMethod((*ended, MethodPhase(self.last.method, str(self.last))))

    def __str__(self) -> str:
        return ", then ".join(str(part) for part in (*self.phases, self.last))


def _check_kind(strategy: object) -> None:
    if not isinstance(strategy, Single):
        raise ConfigError(
            f"Cannot switch to or from {strategy}: a phase is a strategy of four answers, a hierarchy or one of your "
            "own. Write, for example, 'allreduce until epoch 1, then sparknet'.",
            code="cannot-switch", strategy=str(strategy),
        )  # fmt: skip


AnyStrategy = Strategy | Hierarchy | Switching | Own
"""Everything that a strategy can be."""
