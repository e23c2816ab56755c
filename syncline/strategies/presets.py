"""The strategies by name. A new one is a new line here, and at most one new file.

Free of torch at import, so that the driver can check a name before any process starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from syncline.config.spec import Spec
from syncline.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from syncline.strategies.exchange import Exchange, Replica

__all__ = ["check_strategy", "make_exchange", "strategy_names"]

_EXCHANGES = {"allreduce": ("syncline.strategies.allreduce", "AllReduce")}


def strategy_names() -> list[str]:
    """What `--strategy` takes."""
    return sorted(_EXCHANGES)


def check_strategy(text: str) -> None:
    """Raise the error for a strategy that does not exist or does not take these options."""
    spec = Spec.parse(text)
    if spec.name not in _EXCHANGES:
        raise UnknownName.among("strategy", spec.name, _EXCHANGES)
    if spec.options:
        raise ConfigError(f"The strategy {spec.name} has no option {next(iter(spec.options))!r}; it takes none.")


def make_exchange(text: str, replica: Replica) -> Exchange:
    """The exchange of a strategy that `check_strategy` has passed, for one replica."""
    module, name = _EXCHANGES[Spec.parse(text).name]
    exchange: Exchange = getattr(importlib.import_module(module), name)(replica)
    return exchange
