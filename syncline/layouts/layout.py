"""Layouts as data: reading them from text, and which runs they fit.

    replicated      each worker holds the whole model
    sharded         all workers together hold one: each has an equal part of parameters, gradients and optimizer state

Here: `Layout`, `read_layout` and `Layout.check`. Not here: what a worker does
(`sharded.py`, in a user's own loop `own_loop_shards.py`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.errors import ConfigError, UnknownName
from syncline.strategies.method import Method, RunConditions

if TYPE_CHECKING:
    import torch

    from syncline.strategies.exchange import Exchange, Replica

_TEXT = re.compile(r"(?P<name>[\w-]+)\s*(\((?P<argument>.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class Layout:
    """How a replica is spread over workers; the base is `replicated`."""

    name: ClassVar[str] = "replicated"
    keeps_gradients_whole: ClassVar[bool] = True
    """Whether each worker holds all gradients at the end of a backward pass, except in a user's own loop."""
    divides_updates: ClassVar[bool] = False
    """Whether each worker updates a part of the parameters, which all workers hold together."""

    def __str__(self) -> str:
        return self.name

    def check(self, strategy: str, method: Method, run: RunConditions, *, has_memory_limit: bool = False) -> None:
        """`ConfigError` if a run cannot have this layout, with the nearest one that it can have."""

    def explain(self, workers: int, parameter_bytes: int) -> list[str]:
        """What `syncline explain` says about it."""
        del workers, parameter_bytes
        return []

    def exchange(self, replica: Replica, method: Method) -> Exchange:
        """What a worker does in each step; here, what the strategy says."""
        return method.exchange(replica)

    def check_loop(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """`ConfigError` if a user's own loop with these optimizers cannot have this layout."""

    def loop_exchange(self, replica: Replica, method: Method) -> Exchange:
        """What a worker does in the steps of a user's own loop."""
        return method.exchange(replica)

    def before_loading(self, exchange: Exchange, module: torch.nn.Module) -> None:
        """A user's script is about to load other parameters into `module`."""

    def bytes_of_others(self, exchange: Exchange) -> int:
        """How much of the memory that a worker maps counts as that of other workers."""
        del exchange
        return 0


@dataclass(frozen=True)
class Sharded(Layout):
    """All workers hold one model together, in memory that they share."""

    name: ClassVar[str] = "sharded"
    keeps_gradients_whole: ClassVar[bool] = False
    divides_updates: ClassVar[bool] = True

    def check(self, strategy: str, method: Method, run: RunConditions, *, has_memory_limit: bool = False) -> None:
        if has_memory_limit:
            why = "--memory-limit measures steps that hold all gradients"
            raise self._refusal(why, "memory-limit", "--accumulate for smaller micro-batches")
        if not method.sums_exact_gradients:
            why = f"all workers hold one model together, and {strategy} works between several"
            raise self._refusal(why, "strategy", "--strategy allreduce")
        if run.workers > 1 and (run.hosts > 1 or not run.shares_memory):
            raise self._refusal("its workers must be on one host, on CPUs, and share memory", "no-shared-memory")

    def _refusal(self, why: str, reason: str, instead: str = "") -> ConfigError:
        return ConfigError(
            f"--layout sharded is not possible: {why}. Use {f'{instead}, or ' if instead else ''}--layout replicated.",
            code="layout",
            layout=self.name,
            reason=reason,
            nearest="replicated",
        )

    def explain(self, workers: int, parameter_bytes: int) -> list[str]:
        whole = 2 * parameter_bytes
        return [
            "Parameters, gradients and optimizer state exist once, in memory that all workers share, and each worker "
            f"updates an equal part: {whole / workers / 1e6:,.1f} MB of parameters and gradients per worker instead of "
            f"{whole / 1e6:,.1f} MB, and as much less optimizer state.",
            "If a worker fails during its update, another completes it; before, all repeat the step.",
        ]

    def exchange(self, replica: Replica, method: Method) -> Exchange:
        made: Exchange = (
            method.exchange(replica) if replica.collective.size == 1 else _sharded().ShardedExchange(replica, method)
        )
        return made

    def check_loop(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        _own_loop_shards().check_loop(optimizers)

    def loop_exchange(self, replica: Replica, method: Method) -> Exchange:
        is_alone = replica.collective.size == 1
        made: Exchange = method.exchange(replica) if is_alone else _own_loop_shards().OwnLoopShards(replica, method)
        return made

    def before_loading(self, exchange: Exchange, module: torch.nn.Module) -> None:
        if isinstance(exchange, _own_loop_shards().OwnLoopShards):
            exchange.leave(module)

    def bytes_of_others(self, exchange: Exchange) -> int:
        kinds = _sharded().ShardedExchange, _own_loop_shards().OwnLoopShards
        return exchange.bytes_of_others() if isinstance(exchange, kinds) else 0


def _sharded() -> Any:
    """Loaded when it is needed: it imports torch, and the planner reads layouts without it."""
    return importlib.import_module("syncline.layouts.sharded")


def _own_loop_shards() -> Any:
    return importlib.import_module("syncline.layouts.own_loop_shards")


LAYOUTS: Mapping[str, type[Layout]] = {layout.name: layout for layout in (Layout, Sharded)}


def read_layout(text: str) -> Layout:
    """The layout that `text` describes; `ConfigError` says what is wrong with it."""
    found = _TEXT.fullmatch(text.strip())
    name = found["name"] if found is not None else text.strip()
    if name not in LAYOUTS:
        raise UnknownName.among("layout", name, LAYOUTS)
    if found is not None and found["argument"] is not None:
        raise ConfigError(
            f"The layout {name} takes no argument: it is for all workers of the run. Write --layout {name}.",
            code="layout",
            layout=name,
            reason="argument",
            nearest=name,
        )
    return LAYOUTS[name]()
