"""Layouts as data: reading them from text, their products, and which runs they fit.

    replicated                  each worker holds the whole model
    sharded, sharded(n)         n workers (by default all) hold a replica together, each an equal part of every layer
    pipeline(n)                 n workers hold a replica together, each some of its layers
    tensor(n)                   n workers hold a replica together, each a slice of every large layer
    pipeline(2) x sharded(2)    products: here four workers
    partitioned(greedy)         each worker holds the whole network, and a part of the graph (planner only)

Here: `Layout`, `read_layout` and `Layout.check`. Not here: the parts (`sharded.py`, `pipeline.py`, `tensor.py`), which
worker has which place (`grid.py`), and what a worker does (`shared_model.py`, in a user's own loop
`own_loop_shards.py`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from syncline.errors import ConfigError, UnknownName
from syncline.layouts.grid import Grid, fitted
from syncline.layouts.part import LayoutPart, invalid
from syncline.layouts.partitioned import Partitioned
from syncline.layouts.pipeline import Pipeline
from syncline.layouts.sharded import Sharded
from syncline.layouts.tensor import Tensor
from syncline.strategies.method import Method, RunConditions

if TYPE_CHECKING:
    import torch

    from syncline.layouts.shared_model import SharedModelExchange
    from syncline.layouts.spread import ModelSpread
    from syncline.strategies.exchange import Exchange, Replica
    from syncline.telemetry.events import HeldPart

_PART = re.compile(r"(?P<name>[\w-]+)\s*(\((?P<arguments>[^()]*)\))?")
_TIMES = re.compile(r"(?<=[\s)])(?:x|\*|×)(?=\s)|\*|×")

REPLICATED = "replicated"
AUTO = "auto"
"""Chosen before the run starts (`choice.py`)."""
PARTS: Mapping[str, type[LayoutPart]] = {part.name: part for part in (Pipeline, Tensor, Sharded)}
LAYOUTS = (REPLICATED, *PARTS)
NAMES = (*LAYOUTS, AUTO)


@dataclass(frozen=True)
class Layout:
    """How a replica is spread over workers; without any part, each worker holds one."""

    pipeline: Pipeline | None = None
    tensor: Tensor | None = None
    sharded: Sharded | None = None
    partitioned: Partitioned | None = None
    """How the graph of a graph network is divided; the network itself is not."""

    @classmethod
    def of(cls, *parts: LayoutPart) -> Layout:
        """The product of the parts, in any order."""
        names = [part.name for part in parts]
        for part in parts:
            if names.count(part.name) > 1:
                raise invalid(part.name, "...", "a product has each part once", nearest=str(part))
        return cls(**{part.name: part for part in parts})  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[LayoutPart, ...]:
        return tuple(part for part in (self.pipeline, self.tensor, self.sharded) if part is not None)

    def __str__(self) -> str:
        if self.partitioned is not None:
            return str(self.partitioned)
        return " x ".join(str(part) for part in self.parts) or REPLICATED

    def __mul__(self, other: LayoutPart | Layout) -> Layout:
        return Layout.of(*self.parts, *(other.parts if isinstance(other, Layout) else (other,)))

    @property
    def is_replicated(self) -> bool:
        """Whether each worker holds the whole model."""
        return not self.parts

    @property
    def divides_updates(self) -> bool:
        """Whether all workers hold one model together, each computes it whole, and updates a part of it."""
        return self.parts == (Sharded(),)

    def grid(self, workers: int) -> Grid:
        """The place of each of so many workers."""
        if self.partitioned is not None:
            return Grid(slices=workers)  # all compute the same samples together
        shards = 1 if self.sharded is None else self.sharded.n
        stages = 1 if self.pipeline is None else self.pipeline.stages
        slices = 1 if self.tensor is None else self.tensor.slices
        return fitted(workers, shards=shards, stages=stages, slices=slices)

    @property
    def least_workers(self) -> int:
        """How many workers one replica takes."""
        shards = 1 if self.sharded is None else self.sharded.n or 1
        return shards * self.grid(2**20).per_team

    def check(self, strategy: str, method: Method, run: RunConditions) -> None:
        """`ConfigError` if a run cannot have this layout, with the nearest one that it can have."""
        if self.partitioned is not None and not method.sums_exact_gradients:
            raise ConfigError(
                f"--strategy {strategy} is not possible for a graph that is divided over workers: they compute one "
                "gradient together. Use --strategy allreduce, or a model that draws neighbors, such as "
                '"sage(neighbors=10)".',
                code="layout", layout=str(self), reason="strategy", nearest="allreduce",
            )  # fmt: skip
        if self.is_replicated:
            return
        if run.is_own_loop and not self.divides_updates:
            raise _refusal(self, "a script calls the whole model itself", "own-loop", "--layout sharded")
        self._check_strategy(strategy, method, run)
        self._check_workers(run.workers)
        self._check_hosts(method, run)

    def _check_hosts(self, method: Method, run: RunConditions) -> None:
        """A replica is on one host; between hosts there may be a strategy that exchanges for whole replicas."""
        size, hosts = self.grid(run.workers).per_replica, run.hosts_of_workers
        replicas = [set(hosts[first : first + size]) for first in range(0, len(hosts), size)]
        if run.workers > 1 and (not run.shares_memory or any(len(on) > 1 for on in replicas)):
            why = "the workers of a replica must be on one host, on CPUs, and share memory"
            raise _refusal(self, why, "no-shared-memory")
        if run.hosts <= 1:
            return
        if method.sums_exact_gradients:
            why = f"its replicas are on {run.hosts} hosts, and gradients are summed in memory that all replicas share"
            raise _refusal(self, why, "hosts", "--strategy sparknet between replicas")
        if run.on_worker_failure != "replace-only":
            why = "after a failure, workers of different hosts would form a replica until a replacement has come"
            raise _refusal(self, why, "hosts", "--on-worker-failure replace-only")

    def _check_workers(self, workers: int) -> None:
        least = self.least_workers
        if workers == 1 or workers % least == 0:
            return
        below, above = workers // least * least, (workers // least + 1) * least
        fitting = " or ".join(str(n) for n in (below, above) if n)
        raise _refusal(
            self,
            f"a replica takes {least} workers, and --workers {workers} is not a multiple of that",
            "workers",
            f"--workers {fitting}",
        )

    def _check_strategy(self, strategy: str, method: Method, run: RunConditions) -> None:
        if method.sums_exact_gradients:
            return
        if not method.fits_between_replicas:
            why = f"{strategy} does not work between replicas that are spread over several workers"
            raise _refusal(self, why, "strategy", "--strategy allreduce, or --strategy sparknet between replicas")
        if self.grid(run.workers).replicas == 1:
            why = f"all workers hold one model together, and {strategy} works between several"
            raise _refusal(self, why, "one-replica", f"--strategy allreduce, --workers {2 * run.workers}")

    def explain(self, workers: int, parameter_bytes: int, method: Method) -> list[str]:
        """What `syncline explain` says about it."""
        if self.partitioned is not None:
            return self.partitioned.explain(workers)
        grid = self.grid(workers)
        lines = [line for part in self.parts for line in part.explain(grid, parameter_bytes)]
        if lines and grid.replicas > 1:
            between = "" if method.sums_exact_gradients else (
                " For the strategy each replica is one worker; the first of its workers exchanges for all of them, and "
                "if that one fails, the replica does."
            )  # fmt: skip
            lines.insert(0, f"{grid.replicas} replicas of {grid.per_replica} workers each.{between}")
        return lines

    def exchange(self, replica: Replica, method: Method, spread: ModelSpread | None) -> Exchange:
        """What a worker does in each step; where each holds the whole model, what the strategy says."""
        if spread is None:
            return method.exchange(replica)
        kind = _shared_model().SharedModelExchange if method.sums_exact_gradients else _between_replicas()
        made: SharedModelExchange = kind(replica, method, self, spread)
        return made

    def check_loop(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """`ConfigError` if a user's own loop with these optimizers cannot have this layout."""
        if self.divides_updates:
            _own_loop_shards().check_loop(optimizers)

    def loop_exchange(self, replica: Replica, method: Method) -> Exchange:
        """What a worker does in the steps of a user's own loop."""
        is_alone = replica.collective.size == 1 or not self.divides_updates
        made: Exchange = method.exchange(replica) if is_alone else _own_loop_shards().OwnLoopShards(replica, method)
        return made

    def before_loading(self, exchange: Exchange, module: torch.nn.Module) -> None:
        """A user's script is about to load other parameters into `module`."""
        if self.divides_updates and isinstance(exchange, _own_loop_shards().OwnLoopShards):
            exchange.leave(module)

    def held_part(self, exchange: Exchange, optimizer_state: Callable[[], float]) -> HeldPart | None:
        """What a worker holds of the model, unless it is the whole. `optimizer_state`: its size beside parameters."""
        if self.is_replicated or not isinstance(exchange, _shared_model().SharedModelExchange):
            return None
        part: HeldPart | None = exchange.held_part(optimizer_state())
        return part

    def bytes_inside(self, exchange: Exchange) -> int:
        """What a worker has sent to others of its replica."""
        if self.is_replicated or not isinstance(exchange, _shared_model().SharedModelExchange):
            return 0
        sent: int = exchange.bytes_inside()
        return sent

    def bytes_of_others(self, exchange: Exchange) -> int:
        """How much of the memory that a worker maps counts as that of other workers."""
        if self.is_replicated:
            return 0
        kinds = _shared_model().SharedModelExchange, _own_loop_shards().OwnLoopShards
        return exchange.bytes_of_others() if isinstance(exchange, kinds) else 0


def _refusal(layout: Layout, why: str, reason: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"--layout {layout} is not possible: {why}. Use {f'{instead}, or ' if instead else ''}--layout replicated.",
        code="layout",
        layout=str(layout),
        reason=reason,
        nearest=REPLICATED,
    )


def _shared_model() -> Any:
    """Loaded when it is needed: it imports torch, and the planner reads layouts without it."""
    return importlib.import_module("syncline.layouts.shared_model")


def _between_replicas() -> Any:
    return importlib.import_module("syncline.layouts.between_replicas").ReplicaExchange


def _own_loop_shards() -> Any:
    return importlib.import_module("syncline.layouts.own_loop_shards")


def is_auto(text: str) -> bool:
    """Whether the layout is to be chosen."""
    return text.strip() == AUTO


def is_plain(text: str) -> bool:
    """Whether each worker is to hold the whole model."""
    return not is_auto(text) and read_layout(text).is_replicated


def check_layout_text(text: str, *, is_own_loop: bool = False) -> None:
    """`ConfigError` if `text` is neither a layout nor `auto`, which is not for scripts."""
    if not is_auto(text):
        read_layout(text)
    elif is_own_loop:
        raise ConfigError(
            "--layout auto needs to know the model before the start, and a script makes its own. Use --layout "
            "replicated, or --layout sharded, which divides its updates.",
            code="layout", layout=AUTO, reason="own-loop", nearest="sharded",
        )  # fmt: skip


def needs_model(text: str, workers: int, *, has_memory_limit: bool) -> bool:
    """Whether a layout can only be checked or chosen with a look at the model, which takes a second or two."""
    if is_auto(text):
        return True
    layout = read_layout(text)  # where each worker holds the whole model, workers measure what they need
    return workers > 1 and not layout.is_replicated and (has_memory_limit or layout.grid(workers).per_team > 1)


def read_layout(text: str) -> Layout:
    """The layout that `text` describes; `ConfigError` says what is wrong with it."""
    if (partitioned := Partitioned.read(text)) is not None:
        return Layout(partitioned=partitioned)
    parts = [_read_part(part.strip()) for part in _TIMES.split(text.strip())]
    return Layout.of(*(part for part in parts if part is not None))


def _read_part(text: str) -> LayoutPart | None:
    """A part of a product; None for `replicated`."""
    found = _PART.fullmatch(text)
    name = found["name"] if found is not None else text
    if name not in LAYOUTS:
        raise UnknownName.among("layout", name, NAMES)
    arguments = found["arguments"] if found is not None else None
    if name == REPLICATED:
        if arguments is not None:
            raise invalid(name, arguments, "it takes no argument", nearest=REPLICATED)
        return None
    return PARTS[name](**_read_arguments(PARTS[name], arguments or ""))


def _read_arguments(part: type[LayoutPart], text: str) -> dict[str, Any]:
    """The arguments of a part; the first may be without its name."""
    read: dict[str, Any] = {}
    known = [field.name for field in fields(part)]
    for number, argument in enumerate(filter(None, (piece.strip() for piece in text.split(",")))):
        name, equals, value = (piece.strip() for piece in argument.partition("="))
        if not equals:
            name, value = ("n", name) if number == 0 else (name, "")
        if name not in known:
            raise UnknownName.option(part.name, name, known)
        is_number = name in ("n", "micro_batches")
        if is_number and not value.isdigit():
            raise invalid(part.name, argument, f"{name} must be a number")
        read[name] = int(value) if is_number else value
    return read
