"""The second question: when is it exchanged? Answers as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from syncline.errors import ConfigError

__all__ = ["Async", "Every", "Layerwise", "Stale", "When"]


@dataclass(frozen=True)
class Every:
    """All together, every so many steps."""

    steps: int = 1

    def __post_init__(self) -> None:
        if not _is_count(self.steps, least=1):
            raise ConfigError(f"Every({self.steps!r}): the number of steps between exchanges must be 1 or more.")


class _AtOwnPace:
    """What parameter servers ask: how often each parameter is pushed and fetched, given its size."""

    is_by_layer: ClassVar[bool] = False
    push: int = 1
    fetch: int = 1
    rates: Mapping[str, int] = MappingProxyType({})
    bound: int | None = None
    """How many steps a worker may be ahead of the slowest; None: any number."""

    def push_rates(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Every how many steps each parameter is pushed."""
        return dict.fromkeys(sizes, self.push)

    def fetch_rates(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Every how many steps each parameter is fetched."""
        return dict.fromkeys(sizes, self.fetch)


@dataclass(frozen=True)
class Async(_AtOwnPace):
    """Each worker at its own pace, without waiting for others.

    Gradients are added up and pushed every `push` steps; parameters are fetched every `fetch` steps. In between a
    worker trains the parameters that it has.
    """

    push: int = 1
    fetch: int = 1

    def __post_init__(self) -> None:
        for name in ("push", "fetch"):
            if not _is_count(getattr(self, name), least=1):
                raise ConfigError(
                    f"async({name}={getattr(self, name)!r}): the number of steps between one {name} and the next must "
                    "be 1 or more."
                )

    @property
    def rhythm(self) -> str:
        sums = " (gradients add up in between)" if self.push > 1 else ""
        return f"it pushes every {self.push} steps{sums} and fetches every {self.fetch}"


@dataclass(frozen=True)
class Stale(_AtOwnPace):
    """Each worker at its own pace, but at most `bound` steps ahead of the slowest; 0 is lock-step."""

    bound: int = 3

    def __post_init__(self) -> None:
        if not _is_count(self.bound, least=0):
            raise ConfigError(
                f"stale(bound={self.bound!r}): the number of steps that a worker may be ahead of the slowest must be 0 "
                "or more; 3 is usual."
            )

    @property
    def rhythm(self) -> str:
        return f"in every step, at most {self.bound} steps ahead of the slowest"


@dataclass(frozen=True)
class Layerwise(_AtOwnPace):
    """A rate for each layer: small and important ones often, large ones seldom.

    A parameter whose name starts with a key of `rates` is exchanged every that many steps (of several keys the longest
    counts), the one parameter with the most numbers every `largest` steps unless it is named, and all others every
    `others`.
    """

    rates: Mapping[str, int] = field(default_factory=dict, hash=False)
    others: int = 1
    largest: int = 2
    is_by_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rates, Mapping):
            raise ConfigError(
                f"layerwise(rates={self.rates!r}): the rates are written as {{'name': steps}}, where a name is the "
                "beginning of a parameter's name, such as {'fc': 4}."
            )
        object.__setattr__(self, "rates", dict(self.rates))  # a copy, which cannot be changed from outside
        for name, steps in self.rates.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"layerwise(rates={dict(self.rates)!r}): {name!r} is no beginning of a parameter's name; write, "
                    "for example, {'fc': 4}."
                )
            if not _is_count(steps, least=1):
                raise ConfigError(
                    f"layerwise(rates={dict(self.rates)!r}): the number of steps between two exchanges of {name!r} is "
                    f"{steps!r}, but must be 1 or more."
                )
        for name in ("others", "largest"):
            if not _is_count(getattr(self, name), least=1):
                raise ConfigError(
                    f"layerwise({name}={getattr(self, name)!r}): the number of steps between exchanges must be 1 or "
                    "more."
                )

    @property
    def rhythm(self) -> str:
        named = [f"parameters named {name}... every {steps} steps" for name, steps in self.rates.items()]
        return ", ".join([*named, f"the largest every {self.largest} steps", f"all others every {self.others} steps"])

    def push_rates(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return self.rate_of(sizes)

    def fetch_rates(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return self.rate_of(sizes)

    def rate_of(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Every how many steps each parameter is exchanged, given how many numbers each of them has."""
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        rates = {}
        for name in sizes:
            keys = [key for key in self.rates if name.startswith(key)]
            if keys:
                rates[name] = self.rates[max(keys, key=len)]
            else:
                rates[name] = self.largest if name == largest else self.others
        return rates


When = Every | Async | Stale | Layerwise


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
