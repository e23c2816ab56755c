"""From a strategy to the exchange that carries it out."""

from __future__ import annotations

from typing import assert_never

from syncline.strategies.combine_updates import CombineUpdates
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.strategy import Strategy
from syncline.strategies.sum_gradients import SumGradients
from syncline.strategies.what import Gradients, Updates

__all__ = ["make_exchange"]


def make_exchange(strategy: Strategy, replica: Replica) -> Exchange:
    """The exchange for one replica."""
    what = strategy.what
    if isinstance(what, Gradients):
        return SumGradients(replica, strategy.how)
    if isinstance(what, Updates):
        return CombineUpdates(replica, what, strategy.when.steps, strategy.how)
    assert_never(what)
