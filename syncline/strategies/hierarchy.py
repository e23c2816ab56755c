"""`Hierarchy`: one strategy inside a group of workers, another between the groups. A group is a host.

Here: the type, which pairs make sense, and its text form:

    hierarchy(inside_host=gradients | async | memory | exact, across_hosts=updates | every(steps=5) | everyone | exact)

What makes sense:

    inside a host                              across hosts
    gradients | every(1) | everyone            gradients | every(1) | everyone
    gradients | every(1) | everyone            updates | every(n) | everyone or neighbours
    gradients | async | memory                 updates | every(n) | everyone or neighbours
    updates | every(m) | everyone              updates | every(n) | everyone or neighbours, where m divides n
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from syncline.errors import ConfigError
from syncline.strategies.strategy import Strategy, brief, quoted, text_of
from syncline.strategies.what import Gradients, Models, Updates
from syncline.strategies.when import Async, Every
from syncline.strategies.whom import Everyone, Memory, Neighbours, Server

__all__ = ["Hierarchy"]


@dataclass(frozen=True)
class Hierarchy:
    """Workers of one host keep in agreement in one way; hosts, each acting as one worker, in another."""

    inside_host: Strategy
    across_hosts: Strategy
    group: int = 2
    """How many workers make a group where all workers are on one host."""

    def __post_init__(self) -> None:
        for level in ("inside_host", "across_hosts"):
            strategy = getattr(self, level)
            if not isinstance(strategy, Strategy):
                raise ConfigError(
                    f"hierarchy({level}={strategy}): a strategy of four answers is wanted here, such as "
                    "'updates | every(10)'; hierarchies, switches and strategies of one's own do not nest."
                )
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 2:
            raise ConfigError(
                f"hierarchy(group={self.group!r}): the number of workers in a group must be 2 or more, for with 1 "
                f"there is nobody inside to agree with. Use {quoted(brief(self.across_hosts))}, or group=2."
            )
        levels = _Levels(self.inside_host, self.across_hosts)
        mistake = _mistake(levels)
        if mistake is not None:
            nearest = _nearest(levels)
            group = f", group={self.group}" if self.group != 2 else ""
            text = f"hierarchy(inside_host={brief(nearest.inside)}, across_hosts={brief(nearest.across)}{group})"
            raise ConfigError(f"{mistake.because} Use {quoted(text)}.")

    def __str__(self) -> str:
        group = f", group={self.group}" if self.group != 2 else ""
        return f"hierarchy(inside_host={self.inside_host}, across_hosts={self.across_hosts}{group})"


class _Levels(NamedTuple):
    """Two strategies that may not go together."""

    inside: Strategy
    across: Strategy


class _Mistake(NamedTuple):
    because: str
    instead: _Levels


def _nearest(levels: _Levels) -> _Levels:
    mistake = _mistake(levels)
    while mistake is not None:
        levels = mistake.instead
        mistake = _mistake(levels)
    return levels


def _mistake(levels: _Levels) -> _Mistake | None:
    inside, across = levels
    if (because := _mistake_inside(inside)) is not None:
        return _Mistake(because, levels._replace(inside=_instead_inside(inside)))
    if (because := _mistake_across(across)) is not None:
        return _Mistake(because, levels._replace(across=_instead_across(across)))
    if isinstance(across.what, Gradients) and isinstance(inside.what, Updates):
        return _Mistake(
            "Across hosts there are no gradients left to exchange, for inside a host each worker has applied its own.",
            levels._replace(across=_updates(_steps(inside), across)),
        )
    if isinstance(across.what, Gradients) and isinstance(inside.whom, Memory):
        return _Mistake(
            "Across hosts there are no gradients left to exchange, for inside a host each went into the shared memory.",
            levels._replace(across=_updates(10, across)),
        )
    if isinstance(inside.what, Updates) and _steps(across) % _steps(inside):
        rounded = -(-_steps(across) // _steps(inside)) * _steps(inside)
        return _Mistake(
            f"Hosts would exchange after {_steps(across)} steps, when the workers inside, who exchange every "
            f"{_steps(inside)} steps, do not agree: the number across must be a multiple of the one inside.",
            levels._replace(across=dataclasses.replace(across, when=Every(rounded))),
        )
    return None


def _mistake_inside(inside: Strategy) -> str | None:
    if isinstance(inside.whom, (Everyone, Memory)):
        return None  # every strategy with everyone or memory that makes sense by itself does so inside a host
    reasons = {
        Server: "Inside a host there is no need for a server: workers there reach each other directly.",
        Neighbours: "Inside a host the workers act as one, so they must agree, and neighbours do so only in time.",
    }
    rivals = "Inside a host the workers act as one, so they cannot be rivals."
    return reasons.get(type(inside.whom), rivals)


def _mistake_across(across: Strategy) -> str | None:
    if isinstance(across.whom, Everyone):
        return None
    if isinstance(across.whom, Neighbours):
        if isinstance(across.when, Every):
            return None
        return (
            "Across hosts neighbours exchange every so many steps: to average whenever two of them meet, as "
            f"{text_of(across.when)} says, they would have to share memory."
        )
    if isinstance(across.whom, Memory):
        return "Across hosts there is no memory that all could share."
    if isinstance(across.whom, Server):
        return (
            "Across hosts a hierarchy has no server: each host acts as one worker, and these reach each other directly."
        )
    return (
        "Across hosts whole models cannot compete, for the workers of a host would have to train, score and win as one."
    )


def _instead_inside(inside: Strategy) -> Strategy:
    if isinstance(inside.what, Gradients):
        if isinstance(inside.when, Every):
            return Strategy(how=inside.how)
        return Strategy(when=Async(), whom=Memory())
    if isinstance(inside.what, Models):
        return Strategy()
    return Strategy(what=Updates(), when=Every(_steps(inside)))


def _instead_across(across: Strategy) -> Strategy:
    if isinstance(across.what, Gradients) and isinstance(across.when, Every):
        return Strategy(how=across.how)
    if isinstance(across.whom, Neighbours):
        return dataclasses.replace(across, when=Every(1))
    return _updates(_steps(across) if isinstance(across.when, Every) else 10, across)


def _updates(steps: int, like: Strategy) -> Strategy:
    """Averaged updates, encoded as `like` is where that is possible."""
    try:
        return Strategy(what=Updates(), when=Every(steps), how=like.how)
    except ConfigError:
        return Strategy(what=Updates(), when=Every(steps))


def _steps(strategy: Strategy) -> int:
    return strategy.when.steps if isinstance(strategy.when, Every) else 1
