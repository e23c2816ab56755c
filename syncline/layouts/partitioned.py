"""`partitioned`: all workers hold the whole network, and each computes it for its part of a graph.

Not a setting of its own: the planner gives this layout to a graph network, as `--partition` and `--halo` say. What
moves: the values of nodes that are neighbors of another worker's, and their gradients (`comms/halo_exchange.py`); then
the gradients of the parameters, which every strategy's exchange sums as always. Here: the declaration. Not here: the
parts (`graphs/`), and what a worker does (`workers/graph_division.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import ConfigError, UnknownName

PARTITIONERS = ("greedy", "blocks", "hash", "metis", "vertex-cut", "vertex-hash")
_HALO = re.compile(r"exact|stale\((?P<bound>\d+)\)")
_TEXT = re.compile(r"partitioned\((?P<method>[\w-]+)(, stale=(?P<bound>\d+))?\)")


@dataclass(frozen=True)
class Partitioned:
    """The graph is divided by `method`; halos may be `staleness` steps old."""

    method: str = PARTITIONERS[0]
    staleness: int = 0

    def __str__(self) -> str:
        return f"partitioned({self.method}{f', stale={self.staleness}' if self.staleness else ''})"

    @classmethod
    def of(cls, partition: str | None, halo: str) -> Partitioned:
        """From `--partition` and `--halo`; `ConfigError` if they make no sense."""
        method = partition or PARTITIONERS[0]
        if method not in PARTITIONERS:
            raise UnknownName.among("partitioner", method, PARTITIONERS)
        found = _HALO.fullmatch(halo.replace(" ", ""))
        if found is None:
            raise ConfigError.for_setting("halo", halo, "exact, or stale(S) for values up to S steps old")
        return cls(method, int(found["bound"] or 0))

    @classmethod
    def read(cls, text: str) -> Partitioned | None:
        """From the text in a plan; None if it is another layout."""
        found = _TEXT.fullmatch(text.strip())
        return None if found is None else cls(found["method"], int(found["bound"] or 0))

    def explain(self, workers: int) -> list[str]:
        """What `syncline explain` says about it."""
        if workers == 1:
            return ["The graph is not divided: there is one worker."]
        how = f"up to {self.staleness} steps old" if self.staleness else "of the same step, as if one worker computed"
        return [
            f"The graph is divided into {workers} parts ({self.method}). Each worker computes the nodes of its part, "
            f"with the values of neighbors in other parts {how}."
        ]
