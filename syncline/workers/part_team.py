"""`PartTeam`: the workers of a vertex program, each with its part of the graph.

Here: a `Team` over a collective: sums that do not depend on how the graph is divided, and the messages that the cut
needs, from each part to those that read its vertices. Not here: what crosses the cut (`graphs/cut.py`), and copies of
the whole state (`graph_copies.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.comms.collective import Collective
from syncline.comms.messages import Messages
from syncline.graphs.cut import Routes
from syncline.graphs.exact import exact_sum, packed, rounded, together, unpacked
from syncline.graphs.part import State

_ALL = np.array([-1], np.int32)
"""Instead of the places of rows: all rows of the route."""
_COMBINED = (np.sum, np.min, np.max, np.any, np.all)
"""Aggregates of the values of all that are the same aggregate of those of the parts."""


class PartTeam:
    """The team of the part with this rank; `end` is called at the end of each round."""

    def __init__(
        self,
        collective: Collective,
        owners: np.ndarray,
        routes: Routes,
        edge_routes: Routes,
        end: Callable[[State, dict[str, Any]], bool],
    ) -> None:
        self._collective, self._owners, self._end = collective, owners, end
        rank = collective.rank
        self._vertices = _Exchange(collective, rank, routes)
        self._edges = _Exchange(collective, rank, edge_routes)

    @property
    def bytes_sent(self) -> int:
        """What this part has sent across the cut."""
        return self._vertices.bytes_sent + self._edges.bytes_sent

    def total(self, values: np.ndarray) -> float:
        parts = self._collective.all_gather(packed(exact_sum(values)))
        return rounded(together([unpacked(part) for part in parts]))

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        parts = self._collective.all_gather(np.ascontiguousarray(numbers, np.int64).tobytes())
        return np.asarray(np.sum([np.frombuffer(part, np.int64) for part in parts], axis=0))

    def aggregate(self, function: Callable[[np.ndarray], Any], values: np.ndarray, own: np.ndarray) -> Any:
        if any(function is known for known in _COMBINED):
            payload = np.asarray(function(values[own])).reshape(1) if len(own) else np.empty(0, values.dtype)
            parts = self._collective.all_gather(msgspec.msgpack.encode((payload.dtype.str, payload.tobytes())))
            found = [np.frombuffer(data, dtype) for dtype, data in map(_decoded, parts) if data]
            return function(np.concatenate(found))
        whole = np.empty_like(values)
        for rank, part in enumerate(self._collective.all_gather(np.ascontiguousarray(values[own]).tobytes())):
            rows = np.flatnonzero(self._owners == rank)
            whole[rows] = np.frombuffer(part, values.dtype).reshape(len(rows), *values.shape[1:])
        return function(whole)

    def share(self, state: State, names: Sequence[str], changed: np.ndarray) -> np.ndarray:
        received = self._vertices.swap([state[name] for name in names], changed)
        return np.sort(np.concatenate([changed, *received]))

    def share_edges(self, edges: Mapping[str, np.ndarray], names: Sequence[str], changed: np.ndarray) -> None:
        self._edges.swap([edges[name] for name in names], changed)

    def end_round(self, state: State, counters: dict[str, Any]) -> bool:
        return self._end(state, counters)


class _Exchange:
    """Rows of arrays, from each part to those that read them."""

    def __init__(self, collective: Collective, rank: int, routes: Routes) -> None:
        self._collective, self._routes = collective, routes
        self._to = {target: rows for (source, target), rows in routes.items() if source == rank}
        self._from = {source: rows for (source, target), rows in routes.items() if target == rank}
        self._longest = max(map(len, routes.values()), default=0)
        self._row_bytes = -1
        self._messages: Messages | None = None
        self._sent_before = 0
        self._pack = Packer()

    @property
    def bytes_sent(self) -> int:
        return self._sent_before + (self._messages.bytes_sent if self._messages is not None else 0)

    def swap(self, arrays: Sequence[np.ndarray], changed: np.ndarray) -> list[np.ndarray]:
        """Send the changed rows, and write those received; their numbers, part by part."""
        if not self._routes:
            return []
        messages = self._opened(arrays)
        outgoing = {peer: self._pack(arrays, rows, changed) for peer, rows in self._to.items()}
        received = messages.swap(outgoing, sorted(self._from))
        return [unpack(arrays, self._from[peer], parts) for peer, parts in received.items()]

    def _opened(self, arrays: Sequence[np.ndarray]) -> Messages:
        """Channels that are large enough; all parts have the same arrays, so they agree when to open larger ones."""
        needed = sum(array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)) for array in arrays)
        if self._messages is None or needed > self._row_bytes:
            self._sent_before, self._row_bytes = self.bytes_sent, needed
            most = self._longest * (needed + _ALL.itemsize) + 64 * (len(arrays) + 1)
            self._messages = Messages(self._collective, sorted(self._routes), most)
        return self._messages


class Packer:
    """Makes messages of those rows of a route that have changed."""

    def __init__(self) -> None:
        self._is_marked = np.zeros(0, bool)

    def __call__(self, arrays: Sequence[np.ndarray], route: np.ndarray, changed: np.ndarray) -> list[np.ndarray]:
        if len(self._is_marked) < len(arrays[0]):
            self._is_marked = np.zeros(len(arrays[0]), bool)
        self._is_marked[changed] = True
        places = np.flatnonzero(self._is_marked[route])
        self._is_marked[changed] = False
        rows = route[places]
        return [_ALL if len(places) == len(route) else places.astype(np.int32), *(array[rows] for array in arrays)]


def unpack(arrays: Sequence[np.ndarray], route: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Write the rows of a message, and return their numbers."""
    places = parts[0].view(np.int32)
    rows = route if len(places) == 1 and places[0] == _ALL[0] else route[places]
    for array, data in zip(arrays, parts[1:], strict=True):
        array[rows] = data.view(array.dtype).reshape(len(rows), *array.shape[1:])
    return rows


def _decoded(part: bytes) -> Any:
    return msgspec.msgpack.decode(part)
