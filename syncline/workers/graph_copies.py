"""Copies of the state of a vertex program, from which the workers continue when one of them has failed.

Every worker holds a copy of the rows of all, made at the end of a round. A part that failed takes its rows with it; the
others still have them, go back to that round, divide the graph anew, and compute the rounds since then again. Copies
take a small share of the time, and are made several times a second if they are small.

Here: `GraphCopies`: making copies, and agreeing on the one to continue from. Not here: when to (`vertex_job.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from syncline.comms.collective import Collective
from syncline.comms.serialize import dump_state, load_state
from syncline.graphs.part import State

_COUNTERS = ("rounds", "updates", "edge_updates", "tracks")
_LEAST_INTERVAL_S = 0.2
_SHARE_OF_TIME = 0.05
_MADE_ANEW = ("change", "delta.")


@dataclass(frozen=True)
class Copy:
    """The state of all vertices and edges after a round."""

    state: State
    counters: Mapping[str, int]
    """Summed over all workers."""

    @property
    def rounds(self) -> int:
        return self.counters["rounds"]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.state.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, float]) -> Copy:
        state = {name: tensor.numpy() for name, tensor in tensors.items()}
        return cls(state, {name: int(counters[name]) for name in _COUNTERS if name in counters})

    def own_state(self, size: int) -> State:
        """Arrays to compute with; changing them leaves the copy as it is."""
        state = {"change": np.zeros(size), **{name: array.copy() for name, array in self.state.items()}}
        deltas = {f"delta.{name[4:]}": np.zeros_like(array) for name, array in state.items() if name[:4] == "sum."}
        return {**state, **deltas}

    def own_counters(self, rank: int) -> dict[str, Any]:
        """The counters of one worker, so that those of all still add up."""
        shared = {name: self.counters[name] for name in ("rounds", "tracks") if name in self.counters}
        mine = {name: self.counters[name] if rank == 0 else 0 for name in ("updates", "edge_updates")}
        return {**shared, **mine}


class GraphCopies:
    """This worker's newest copy."""

    def __init__(self, first: Copy | None = None) -> None:
        self.newest = first
        self._made_at = time.monotonic()
        self._cost_s = 0.0

    def is_due(self) -> bool:
        interval = max(_LEAST_INTERVAL_S, self._cost_s / _SHARE_OF_TIME)
        return time.monotonic() - self._made_at > interval

    def make(
        self, collective: Collective, state: State, counters: Mapping[str, Any], vertices: np.ndarray, edges: np.ndarray
    ) -> Copy:
        """Gather the rows of all workers; `vertices` and `edges` are the ranks that hold the rows of each."""
        began = time.monotonic()
        names = sorted(name for name in state if not name.startswith(_MADE_ANEW))
        rows_of = {rank: (np.flatnonzero(vertices == rank), np.flatnonzero(edges == rank)) for rank in
                   range(collective.size)}  # fmt: skip
        own = rows_of[collective.rank]
        numbers = np.array([int(counters.get(name, 0)) for name in _COUNTERS], np.int64)
        mine = [numbers.tobytes()]
        mine += [np.ascontiguousarray(state[name][own[name.startswith("edge.")]]).tobytes() for name in names]
        whole = {name: np.empty_like(state[name]) for name in names}
        sums = np.zeros(len(_COUNTERS), np.int64)
        for rank, part in enumerate(collective.all_gather(b"".join(mine))):
            sums += np.frombuffer(part, np.int64, len(_COUNTERS))
            start = numbers.nbytes
            for name in names:
                rows, array = rows_of[rank][name.startswith("edge.")], whole[name]
                count = len(rows) * int(np.prod(array.shape[1:], dtype=np.int64))
                found = np.frombuffer(part, array.dtype, count, start)
                array[rows] = found.reshape(len(rows), *array.shape[1:])
                start += found.nbytes
        of_all = dict(zip(_COUNTERS, map(int, sums), strict=True))
        self.newest = Copy(whole, {**of_all, "rounds": int(counters["rounds"]), "tracks": int(counters["tracks"])})
        self._made_at = time.monotonic()
        self._cost_s = self._made_at - began
        return self.newest

    def agree(self, collective: Collective) -> int:
        """Take the newest copy that any member has, if there is one; how many bytes were sent for that."""
        mine = -1 if self.newest is None else self.newest.rounds
        rounds = [int(text) for text in collective.all_gather(b"%d" % mine)]
        latest = max(rounds)
        if latest < 0 or min(rounds) == latest:
            return 0
        is_source = collective.rank == rounds.index(latest)
        payload = b""
        if is_source:
            assert self.newest is not None, "it has the latest round"
            payload = dump_state({"state": self.newest.tensors(), "counters": dict(self.newest.counters)})
        sent = collective.all_gather(payload)[rounds.index(latest)]
        if mine != latest:
            received = load_state(sent)
            self.newest = Copy.of(received["state"], received["counters"])
        return len(sent) * sum(r != latest for r in rounds)
