"""What a run must have for a strategy, and what a strategy is from a run's point of view.

Here: answers about a strategy that the planner asks, before any process starts. Not here: which combinations of answers
make sense anywhere (`strategy.py`, `hierarchy.py`, `switching.py`).
"""

from __future__ import annotations

from syncline.algorithms.outer import elastic
from syncline.errors import ConfigError
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.own import AnyStrategy, Own
from syncline.strategies.strategy import Strategy
from syncline.strategies.switching import Switching
from syncline.strategies.what import Gradients, Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import Everyone, Memory, Neighbours, Rivals, Server

__all__ = ["check_feasible", "held_out", "is_asynchronous", "is_synchronous_gradients", "servers_needed"]


def check_feasible(
    strategy: AnyStrategy,
    *,
    workers: int,
    hosts: int,
    shares_memory: bool,
    is_own_loop: bool,
    clip_norm: float | None,
) -> None:
    """`ConfigError` if a run with these workers cannot keep in agreement so.

    `shares_memory` says whether workers of one host can see the same memory; hosts never can.
    """
    for phase in _phases(strategy):
        if isinstance(phase, Hierarchy):
            _check_hierarchy(phase, workers=workers, hosts=hosts, shares_memory=shares_memory)
        else:
            _check(phase, workers=workers, hosts=hosts, shares_memory=shares_memory)
            _check_task(phase, is_own_loop=is_own_loop, clip_norm=clip_norm, workers=workers)


def servers_needed(strategy: AnyStrategy) -> int:
    """How many server processes a run must start: the most that any phase needs, 0 if none does."""
    return max((s.whom.shards for s in _levels(strategy) if isinstance(s.whom, Server)), default=0)


def is_asynchronous(strategy: AnyStrategy) -> bool:
    """Whether, at least for a time, each worker goes at its own pace and there is no step that all take together.

    Not so in a hierarchy, even with Hogwild inside: its groups meet every so many steps.
    """
    return any(isinstance(s, Strategy) and _is_at_own_pace(s) for s in _phases(strategy))


def is_synchronous_gradients(strategy: AnyStrategy) -> bool:
    """Whether all workers take every step together with one gradient, from beginning to end, on all levels.

    Then their forward passes run in step, too, so that batch norm can be computed over all of them.
    """
    return not isinstance(strategy, Own) and all(_sums_gradients(s) for s in _levels(strategy))


def held_out(strategy: AnyStrategy) -> float:
    """The part of the training data that is kept for tournaments; 0 if there are none."""
    return max((s.what.held_out for s in _levels(strategy) if isinstance(s.what, Models)), default=0.0)


def _phases(strategy: AnyStrategy) -> tuple[Strategy | Hierarchy, ...]:
    if isinstance(strategy, Own):
        return ()  # nobody knows what it needs but itself
    return strategy.strategies if isinstance(strategy, Switching) else (strategy,)


def _levels(strategy: AnyStrategy) -> list[Strategy]:
    levels: list[Strategy] = []
    for phase in _phases(strategy):
        levels += [phase.inside_host, phase.across_hosts] if isinstance(phase, Hierarchy) else [phase]
    return levels


def _is_at_own_pace(strategy: Strategy) -> bool:
    if isinstance(strategy.what, Updates) and isinstance(strategy.what.outer, elastic):
        return True  # worker and centre meet two by two
    when = strategy.when
    return isinstance(when, (Async, Layerwise)) or (isinstance(when, Stale) and when.bound > 0)


def _sums_gradients(strategy: Strategy) -> bool:
    is_together = isinstance(strategy.when, Every) or strategy.when == Stale(0)
    return isinstance(strategy.what, Gradients) and is_together and isinstance(strategy.whom, (Everyone, Server))


def _check(strategy: Strategy, *, workers: int, hosts: int, shares_memory: bool) -> None:
    whom, when = strategy.whom, strategy.when
    if isinstance(whom, Rivals) and workers < 2:
        raise ConfigError(
            f"A tournament needs two models that compete, but there is {workers} worker. Set --workers to 2 or more, "
            "or use --strategy allreduce."
        )
    if isinstance(whom, Memory) and workers > 1:
        if hosts > 1:
            h2o = (
                "h2o, which shares memory inside each host and combines updates between them, or "
                if shares_memory
                else ""
            )
            raise ConfigError(
                f"These workers are on {hosts} hosts, and no memory is shared between hosts. Use --strategy {h2o}"
                "server-async, which does the same through a server."
            )
        if not shares_memory:
            raise ConfigError(f"{_NO_MEMORY} Use --strategy server-async, which does the same through a server.")
    if isinstance(whom, Neighbours) and isinstance(when, Async) and workers > 1 and (hosts > 1 or not shares_memory):
        because = f"These workers are on {hosts} hosts, which share no memory," if hosts > 1 else _NO_MEMORY
        joined = "and neighbours" if hosts > 1 else "Neighbours"
        raise ConfigError(
            f"{because} {joined} who average whenever two of them meet do so in shared memory. "
            f"Use --strategy \"gossip(topology='{whom.topology}')\", in which all average at the same step."
        )


def _check_task(strategy: Strategy, *, is_own_loop: bool, clip_norm: float | None, workers: int) -> None:
    if isinstance(strategy.what, Models) and is_own_loop:
        raise ConfigError(
            "Models compete by their score on held-out data, and Syncline cannot score a model that a script trains in "
            "a loop of its own. Use syncline train, which has model, data and loss, or another strategy such as gossip."
        )
    shards = strategy.whom.shards if isinstance(strategy.whom, Server) else 1
    if clip_norm is not None and shards > 1 and workers > 1 and _sums_gradients(strategy):
        raise ConfigError(
            f"The gradients' norm cannot be clipped to {clip_norm:g} at {shards} servers, each of which sees only its "
            "part of them. Set shards=1, use --strategy allreduce, or leave out --clip-norm."
        )


def _check_hierarchy(strategy: Hierarchy, *, workers: int, hosts: int, shares_memory: bool) -> None:
    if workers == 1:
        return
    group = strategy.group
    if isinstance(strategy.inside_host.whom, Memory) and not shares_memory:
        raise ConfigError(
            f"{_NO_MEMORY} Sum gradients inside a host instead, with a hierarchy whose inside_host is allreduce."
        )
    if hosts > 1:
        return
    if workers < 2 * group:
        smaller = f", or group to {workers // 2}" if workers >= 4 else ""
        raise ConfigError(
            f"A hierarchy needs two groups, and on this one host a group is {group} workers, but there are {workers} "
            f"in all. Set --workers to {2 * group} or more{smaller}."
        )
    if workers % group:
        fitting = [g for g in range(2, workers // 2 + 1) if workers % g == 0]
        other = f", or group to {min(fitting, key=lambda g: abs(g - group))}" if fitting else ""
        raise ConfigError(
            f"{workers} workers cannot be shared out into groups of {group}. Set --workers to "
            f"{workers // group * group} or {(workers // group + 1) * group}{other}."
        )


_NO_MEMORY = "The workers of this run do not share memory (its collective is not shared-memory)."
