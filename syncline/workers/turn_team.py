"""`TurnTeam`: a team of parts that take turns, on the workers of one host.

Here: the tokens of one part, and the messages that carry them. Not here: what a part does in its turn, and why that is
safe (`graphs/asynchronous.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from syncline.comms.collective import Collective
from syncline.comms.messages import Messages
from syncline.comms.process_group import ProcessGroup
from syncline.errors import ConfigError
from syncline.graphs.cut import Routes
from syncline.graphs.part import State
from syncline.workers.part_team import Packer, PartTeam, unpack

_NONE = np.empty(0, np.int64)


class TurnTeam(PartTeam):
    """The team of the part with this rank; `has_token` says between which parts there is a token."""

    def __init__(
        self,
        collective: Collective,
        owners: np.ndarray,
        routes: Routes,
        edge_routes: Routes,
        end: Callable[[State, dict[str, Any]], bool],
        *,
        has_token: np.ndarray,
        first: State,
    ) -> None:
        if isinstance(collective, ProcessGroup):
            raise ConfigError(
                "Asynchronous parts need workers that share memory, but these exchange through torch.distributed. "
                "Leave out asynchronous, or run all workers on one host.", code="asynchronous-needs-memory",
            )  # fmt: skip
        super().__init__(collective, owners, routes, edge_routes, end)
        self._rank = collective.rank
        self._peers = [int(peer) for peer in np.flatnonzero(has_token[self._rank])]
        self._holds: dict[int, bool] = {}
        self._awaited: dict[int, int] = {}
        self._change = np.zeros_like(first["change"])
        self._is_unsent = np.zeros(len(self._change), bool)
        self._edge_names = sorted(name for name in first if name.startswith("edge."))
        self._is_edge_unsent = np.zeros(max((len(first[name]) for name in self._edge_names), default=0), bool)
        self._routes, self._edge_routes, self._pack = routes, edge_routes, Packer()
        pairs = [(int(a), int(b)) for a, b in np.argwhere(has_token)]
        self._tokens = Messages(collective, pairs, max((self._bytes(first, pair) for pair in pairs), default=0))

    @property
    def bytes_sent(self) -> int:
        return self._tokens.bytes_sent

    def share(self, state: State, names: Sequence[str], changed: np.ndarray) -> np.ndarray:
        """Remember what to send in the next turn."""
        del names
        self._change[changed] += state["change"][changed]
        self._is_unsent[changed] = True
        return changed

    def share_edges(self, edges: Mapping[str, np.ndarray], names: Sequence[str], changed: np.ndarray) -> None:
        del edges, names
        self._is_edge_unsent[changed] = True

    def begin(self) -> None:
        self._holds = {peer: self._rank < peer for peer in self._peers}
        self._awaited = dict.fromkeys(self._peers, 0)

    def has_turn(self) -> bool:
        return all(self._holds.values())

    def take(self, state: State, *, wait: bool) -> np.ndarray | None:
        missing = [peer for peer, is_here in self._holds.items() if not is_here]
        arrived = [peer for peer in missing if self._tokens.has_message(peer)]
        if not arrived and not wait:
            return None
        return self._taken(state, (arrived or missing)[0])

    def take_last(self, state: State) -> np.ndarray | None:
        missing = [peer for peer, count in self._awaited.items() if count > 0]
        return self._taken(state, missing[0]) if missing else None

    def give(self, state: State) -> None:
        changed, edges = np.flatnonzero(self._is_unsent), np.flatnonzero(self._is_edge_unsent)
        edge_arrays = [state[name] for name in self._edge_names]
        for peer in self._peers:
            route = self._routes.get((self._rank, peer), _NONE)
            parts = self._pack([state["value"], self._change], route, changed)
            if edge_arrays:
                parts += self._pack(edge_arrays, self._edge_routes.get((self._rank, peer), _NONE), edges)
            self._tokens.send(peer, parts)
            self._holds[peer] = False
            self._awaited[peer] += 1
        self._change[changed] = 0.0
        self._is_unsent[changed] = self._is_edge_unsent[edges] = False

    def _taken(self, state: State, peer: int) -> np.ndarray:
        parts = self._tokens.receive(peer)
        rows = unpack([state["value"], state["change"]], self._routes.get((peer, self._rank), _NONE), parts[:3])
        if self._edge_names:
            arrays = [state[name] for name in self._edge_names]
            unpack(arrays, self._edge_routes.get((peer, self._rank), _NONE), parts[3:])
        self._holds[peer] = True
        self._awaited[peer] -= 1
        return rows

    def _bytes(self, first: State, pair: tuple[int, int]) -> int:
        """How large a message of this route gets."""
        row = sum(_row_bytes(first[name]) for name in ("value", "change")) + 4
        edge = sum(_row_bytes(first[name]) for name in self._edge_names) + 4
        return len(self._routes.get(pair, _NONE)) * row + len(self._edge_routes.get(pair, _NONE)) * edge + 1024


def _row_bytes(array: np.ndarray) -> int:
    return array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
