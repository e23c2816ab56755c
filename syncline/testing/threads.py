"""Workers as threads of one process, for tests.

Here: `ThreadCollective`, the `Collective` of workers that are threads, and `run_on_threads`, which starts them and
brings their results or their first failure home. Not here: the collectives of real runs (`syncline.comms`); those
move the same tensors between processes, much faster.

    def work(collective: Collective) -> float:
        tensor = torch.tensor([float(collective.rank)])
        collective.sum_(tensor)
        return tensor.item()

    assert run_on_threads(3, work) == [3.0, 3.0, 3.0]

Sums are taken in rank order, so they are the same bits in every run. Every wait has a time limit. Ranks that make
different calls, which would hang or mix up data in a real run, get an `AssertionError` that says who called what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from syncline.comms.collective import Collective, check_mixing, mixed, takers
from syncline.errors import PeerLost

__all__ = ["ThreadCollective", "run_on_threads", "thread_collectives"]

Result = TypeVar("Result")


class _Table:
    """What the threads share: one place for each rank's call and payload, and the barrier around them.

    Python's own `threading.Barrier` fails a thread that is slow to leave if another one has left and aborted meanwhile.
    Here, as between processes, a barrier to which everybody came is complete.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.calls: list[str] = [""] * size
        self.payloads: list[object] = [None] * size
        self._children: list[_Table] = []
        self._size = size
        self._changed = threading.Condition()
        self._arrived = 0
        self._rounds = 0
        self._aborted = False

    def wait(self, doing: str) -> None:
        with self._changed:
            if not self._aborted:
                this_round = self._rounds
                self._arrived += 1
                if self._arrived == self._size:
                    self._arrived = 0
                    self._rounds += 1
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._rounds != this_round or self._aborted, self.timeout_s)
                if self._rounds != this_round:
                    return
        self.abort()  # also after the time limit, for those who wait as well
        raise PeerLost(
            f"While this worker was in {doing}, another one aborted, failed or did not come within "
            f"{self.timeout_s:g} s. Look for that worker's error, or for a call that only some ranks make."
        )

    def child(self, size: int) -> _Table:
        """A table that is aborted with this one."""
        table = _Table(size, self.timeout_s)
        with self._changed:
            self._children.append(table)
            aborted = self._aborted
        if aborted:
            table.abort()
        return table

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
            children = list(self._children)
        for child in children:
            child.abort()


class ThreadCollective:
    """One rank's end of a `Collective` between threads; `thread_collectives` makes all ends at once."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self._rank = rank
        self._size = size
        self._table = table
        self.bytes_sent, self.waited_s = 0, 0.0

    @property
    def rank(self) -> int:
        """This thread's place."""
        return self._rank

    @property
    def size(self) -> int:
        """How many threads take part."""
        return self._size

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: threads share all of it anyway."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def share(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same tensor object on every rank."""
        mine = torch.zeros(numel if self.rank == 0 else 0, dtype=dtype)
        return self._exchange(f"share of {numel} {_name(dtype)}", mine)[0]

    def sum_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Add up in rank order, starting from rank 0's term."""
        self.bytes_sent += tensor.nbytes
        term = tensor.detach().clone() if weight == 1.0 else tensor.detach() * weight  # 1.0 would round integers
        terms = self._exchange(f"sum_ of {_describe(tensor)}", term)
        with torch.no_grad():
            total = terms[0].clone()
            for term in terms[1:]:
                total += term
            tensor.copy_(total)

    def mix_(self, tensor: torch.Tensor, mixing: Mapping[int, Mapping[int, float]]) -> None:
        """Take from the copies that the others put on the table; different mixings are different calls."""
        check_mixing(tensor, mixing, self.size)
        self.bytes_sent += tensor.nbytes * len(takers(mixing, self.rank))
        listed = {rank: dict(sorted(mixing[rank].items())) for rank in sorted(mixing)}
        tensors = self._exchange(f"mix_ of {_describe(tensor)} with {listed}", tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(mixed(dict(enumerate(tensors)), mixing[self.rank]))

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy from rank `source`."""
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        tensors = self._exchange(f"broadcast_ of {_describe(tensor)} from rank {source}", tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(tensors[source])

    def gather(self, payload: bytes) -> list[bytes]:
        """The payloads as they are."""
        self.bytes_sent += len(payload)
        return self._exchange("gather", payload)

    def barrier(self) -> None:
        """Wait for all the threads."""
        self._exchange("barrier", None)

    def hosts(self) -> list[int]:
        """One: threads share their process."""
        return [0] * self.size

    def split(self, color: int) -> Collective:
        """A table of its own for each color, made by the first rank of it."""
        colors = self._exchange("split", color)
        members = [rank for rank, theirs in enumerate(colors) if theirs == color]
        made = self._table.child(len(members)) if self.rank == members[0] else None
        table = self._exchange("split, the tables", made)[members[0]]
        assert table is not None, "the first rank of a color makes its table"
        return ThreadCollective(members.index(self.rank), len(members), table)

    def abort(self) -> None:
        """Break the barrier, for good, and those of what was split from it."""
        self._table.abort()

    def close(self) -> None:
        """Nothing is held."""

    def _exchange(self, call: str, payload: Result) -> list[Result]:
        """Everybody's payload in rank order, if everybody made the same call."""
        table = self._table
        table.calls[self._rank] = call
        table.payloads[self._rank] = payload
        table.wait(call)
        calls = list(table.calls)
        payloads: list[Result] = list(table.payloads)  # type: ignore[arg-type]  # the same call puts the same type
        table.wait(call)  # only now may a quick rank overwrite its place with its next call
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            raise AssertionError(
                f"The ranks made different calls at the same time ({listed}). A collective call must be made by "
                "every rank, in the same order and with the same shapes."
            )
        return payloads


def thread_collectives(size: int, *, timeout_s: float = 30.0) -> list[Collective]:
    """The ends of one collective between `size` threads, in rank order; give one to each thread."""
    assert size >= 1, f"A collective needs at least one worker, not {size}."
    table = _Table(size, timeout_s)
    return [ThreadCollective(rank, size, table) for rank in range(size)]


def run_on_threads(size: int, work: Callable[[Collective], Result], *, timeout_s: float = 30.0) -> list[Result]:
    """Run `work(collective)` once for each rank, all at the same time; the results in rank order.

    When a rank fails, the others are aborted and the first cause is raised here.
    """
    collectives = thread_collectives(size, timeout_s=timeout_s)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(collective: Collective) -> None:
        try:
            results[collective.rank] = work(collective)
        except BaseException as failure:
            failures.append(failure)
            collective.abort()

    threads = [threading.Thread(target=run, args=(c,), daemon=True, name=f"rank {c.rank}") for c in collectives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A lost peer is a consequence: prefer the failure that made it so, even if it was recorded a moment later.
    for failure in sorted(failures, key=lambda f: isinstance(f, PeerLost)):
        raise failure
    return [results[rank] for rank in range(size)]


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {_name(tensor.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
