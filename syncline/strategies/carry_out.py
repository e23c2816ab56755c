"""From a strategy to the exchange that carries it out."""

from __future__ import annotations

import functools

from syncline.algorithms.outer import elastic
from syncline.errors import ConfigError
from syncline.strategies.combine_updates import CombineUpdates
from syncline.strategies.compete import Compete
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import Exact
from syncline.strategies.levels import in_levels
from syncline.strategies.mix_at_any_time import MixAtAnyTime
from syncline.strategies.mix_neighbours import MixNeighbours
from syncline.strategies.own import AnyStrategy, Own
from syncline.strategies.pull_elastic import PullElastic
from syncline.strategies.push_and_fetch import PushAndFetch
from syncline.strategies.share_memory import ShareMemory
from syncline.strategies.strategy import Strategy
from syncline.strategies.sum_at_server import SumAtServer
from syncline.strategies.sum_gradients import SumGradients
from syncline.strategies.switching import Switching, Until
from syncline.strategies.take_turns import TakeTurns, Turn
from syncline.strategies.what import Models, Updates
from syncline.strategies.when import Every, Stale
from syncline.strategies.whom import Everyone, Memory, Neighbours, Rivals, Server

__all__ = ["make_exchange"]


def make_exchange(strategy: AnyStrategy, replica: Replica) -> Exchange:
    """The exchange for one replica."""
    if isinstance(strategy, Own):
        made: Exchange = strategy.make().exchange(replica)
        return made
    if isinstance(strategy, Switching):
        ends = [*(_end_of(phase.until, replica) for phase in strategy.phases), None]
        turns = [
            Turn(str(each), end, functools.partial(make_exchange, each))
            for each, end in zip(strategy.strategies, ends, strict=True)
        ]
        return TakeTurns(replica, turns)
    if isinstance(strategy, Hierarchy):
        if replica.collective.size == 1:
            return SumGradients(replica, Exact())
        return in_levels(replica, strategy.inside_host, strategy.across_hosts, strategy.group)
    return _exchange_of(strategy, replica)


def _exchange_of(strategy: Strategy, replica: Replica) -> Exchange:
    what, when, whom, how = strategy.what, strategy.when, strategy.whom, strategy.how
    is_alone = replica.collective.size == 1
    match whom:
        case Everyone() if isinstance(what, Updates) and isinstance(when, Every):
            return CombineUpdates(replica, what, when.steps, how)
        case Everyone():
            return SumGradients(replica, how)
        case Server() if isinstance(what, Updates) and isinstance(what.outer, elastic) and isinstance(when, Every):
            return PullElastic(replica, what.outer, when.steps)
        case Server() if isinstance(when, Every) or (isinstance(when, Stale) and when.bound == 0):
            return SumAtServer(replica, how, whom.optimizer)  # nobody ahead of anybody is all together
        case Server() if not isinstance(when, Every):
            return PushAndFetch(replica, when, how, whom.optimizer)
        case Memory() | Neighbours() if is_alone:
            return SumGradients(replica, Exact())
        case Memory():
            return ShareMemory(replica)
        case Neighbours() if isinstance(when, Every):
            return MixNeighbours(replica, whom.topology, when.steps)
        case Neighbours():
            return MixAtAnyTime(replica)
        case Rivals() if isinstance(what, Models) and isinstance(when, Every):
            return Compete(replica, what, when.steps)
    raise AssertionError(f"Strategy let {strategy} through, but nothing carries it out")


def _end_of(until: Until, replica: Replica) -> int:
    if until.unit == "step":
        return until.number
    if replica.steps_per_epoch is None:
        raise ConfigError("A strategy that changes after an epoch needs a run whose epochs have a known length.")
    return until.number * replica.steps_per_epoch
