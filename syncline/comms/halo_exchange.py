"""Rows of a divided table that ranks read of each other: values forward, gradients back.

Here: `HaloExchange`: `fetch` gives each rank its halo, the rows of others that it computes with, and its gradient adds
up, at the owner, what all ranks computed for a row. `combine` is the reverse: rows of the halo are sums of which each
rank has a part. With a `staleness` of s, a rank keeps what it has read for s more steps, gradients included. Not here:
which rows (`graphs/halo.py`).

Where ranks share memory, they post rows there, in one of two slots used in turn: a rank fills a slot again only when
all have reached the barrier of the turn in between, and so have read it. Elsewhere rows travel by `all_gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from syncline.comms.collective import Collective
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.errors import ConfigError

Reads = Sequence[tuple[int, np.ndarray, np.ndarray]]


class Trading(Protocol):
    """Which rows go where (`graphs/halo.py`)."""

    @property
    def boundary(self) -> list[np.ndarray]: ...

    @property
    def halo_sizes(self) -> list[int]: ...

    @property
    def reads(self) -> list[list[tuple[int, np.ndarray, np.ndarray]]]: ...

    def rows_sent(self, rank: int) -> int: ...

    def givers(self, rank: int) -> list[tuple[int, np.ndarray, np.ndarray]]: ...


class HaloExchange:
    """One rank's side. All ranks make the same calls in the same order, this constructor included."""

    def __init__(self, collective: Collective, trades: Trading, *, staleness: int = 0) -> None:
        rank = collective.rank
        self.staleness = staleness
        self.bytes_sent = 0
        self.age: int | None = None
        """How many steps ago the halos were read; None before the first step."""
        self.halo = trades.halo_sizes[rank]
        """How many rows this rank reads."""
        self._collective, self._rank = collective, rank
        self._boundary = _index(trades.boundary[rank])
        self._reads = [(other, _index(places), _index(rows)) for other, places, rows in trades.reads[rank]]
        self._givers = [(other, _index(rows), _index(own)) for other, rows, own in trades.givers(rank)]
        self._rows_sent, self._rows_returned = trades.rows_sent(rank), self.halo
        self._counts = [max(len(b), h) for b, h in zip(trades.boundary, trades.halo_sizes, strict=True)]
        self._posted = [len(rows) for rows in trades.boundary], list(trades.halo_sizes)
        self._slots: torch.Tensor | None = None
        self._shares_memory, self._turns = True, 0
        self._is_fresh, self._calls = True, 0
        self._kept: dict[int, torch.Tensor] = {}
        self._kept_gradients: dict[int, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Decide whether the step reads its halos anew; all ranks alike."""
        self._is_fresh = self.age is None or self.age >= self.staleness
        self.age = 0 if self._is_fresh or self.age is None else self.age + 1
        self._calls = 0

    def fetch(self, own: torch.Tensor) -> torch.Tensor:
        """The `own` rows, followed by those of the halo."""
        call, self._calls = self._calls, self._calls + 1
        fetched: torch.Tensor = _Fetch.apply(own, self, call)  # type: ignore[no-untyped-call]
        return fetched

    def combine(self, local: torch.Tensor) -> torch.Tensor:
        """The own rows of `local`, plus what the other ranks have for them in their halos."""
        call, self._calls = self._calls, self._calls + 1
        combined: torch.Tensor = _Combine.apply(local, self, call)  # type: ignore[no-untyped-call]
        return combined

    def read(self, own: torch.Tensor, call: int) -> torch.Tensor:
        """The rows of the halo, new or kept."""
        if not self._is_fresh:
            return self._kept[call]
        posted = self._trade(own.index_select(0, self._boundary), self._posted[0])
        halo = own.new_empty((self.halo, *own.shape[1:]))
        for other, places, rows in self._reads:
            halo[rows] = posted[other].index_select(0, places)
        self.bytes_sent += self._rows_sent * _row_bytes(own)
        if self.staleness:
            self._kept[call] = halo
        return halo

    def add_returned(self, own: torch.Tensor, halo: torch.Tensor, call: int) -> None:
        """Add to the `own` rows what the others have for them in their halos, as this rank has in `halo`."""
        if not self._is_fresh:
            own.add_(self._kept_gradients[call])
            return
        posted = self._trade(halo, self._posted[1])
        returned = torch.zeros_like(own) if self.staleness else own
        for other, rows, mine in self._givers:  # in the order of the ranks, so that sums have the same bits
            returned.index_add_(0, mine, posted[other].index_select(0, rows))
        self.bytes_sent += self._rows_returned * _row_bytes(own)
        if self.staleness:
            self._kept_gradients[call] = returned
            own.add_(returned)

    def _trade(self, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """What each rank posts, of so many rows."""
        rows = rows.detach().contiguous()
        shape, width = rows.shape[1:], int(np.prod(rows.shape[1:], dtype=np.int64))
        slot = self._slot(width, rows.dtype)
        if slot is None:
            gathered = self._collective.all_gather(rows.numpy().tobytes())
            return [_tensor(data, rows.dtype).view(count, *shape) for data, count in zip(gathered, counts, strict=True)]
        slot[self._rank, : rows.numel()] = rows.view(-1)
        self._collective.barrier()
        return [slot[rank, : count * width].view(count, *shape) for rank, count in enumerate(counts)]

    def _slot(self, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory of this turn, as a row of numbers for each rank; None if ranks share none."""
        ranks, needed = self._collective.size, max(max(self._counts), 1) * width * dtype.itemsize
        if self._shares_memory and (self._slots is None or self._slots.shape[2] < needed):
            try:
                bytes_each = 2 ** (needed - 1).bit_length()
                memory = self._collective.allocate_shared(2 * ranks * bytes_each, torch.uint8)
                self._slots = memory.view(2, ranks, bytes_each)
            except (ConfigError, SharedMemoryFull):  # on all ranks alike
                self._shares_memory = False
        self._turns += 1
        if not self._shares_memory or self._slots is None:
            return None
        return self._slots[self._turns % 2].view(dtype)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, exchange: HaloExchange, call: int) -> torch.Tensor:
        ctx.exchange, ctx.call, ctx.own = exchange, call, len(own)
        return torch.cat([own, exchange.read(own, call)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own = gradient[: ctx.own].clone()
        ctx.exchange.add_returned(own, gradient[ctx.own :], ctx.call)
        return own, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, exchange: HaloExchange, call: int) -> torch.Tensor:
        ctx.exchange, ctx.call = exchange, call
        count = len(local) - exchange.halo
        own = local[:count].clone()
        exchange.add_returned(own, local[count:], call)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.contiguous()
        return torch.cat([gradient, ctx.exchange.read(gradient, ctx.call)]), None, None


def _index(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, np.int64))


def _tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _row_bytes(x: torch.Tensor) -> int:
    return int(np.prod(x.shape[1:], dtype=np.int64)) * x.element_size()
