"""Workers and parameter servers as threads of one process, for tests.

Here: `ThreadCollective`, the `Collective` of workers that are threads; `run_on_threads`, which starts them and returns
their results or raises their first failure; `servers_on_threads`. Not here: the collectives of real runs
(`syncline.comms`); those move the same tensors between processes, much faster.

    def work(collective: Collective) -> float:
        tensor = torch.tensor([float(collective.rank)])
        collective.all_reduce_(tensor)
        return tensor.item()

    assert run_on_threads(3, work) == [3.0, 3.0, 3.0]

Sums are taken in rank order, so they are the same bits in every run. Every wait has a time limit. Ranks that make
different calls, which would hang or mix up data in a real run, get an `AssertionError` that says who called what.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

from syncline.comms.collective import Collective, check_mixing, mixed, takers
from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.server import Served, serve
from syncline.errors import PeerFailed

__all__ = ["ThreadCollective", "call_on_threads", "run_on_threads", "servers_on_threads", "thread_collectives"]

Result = TypeVar("Result")


class _Table:
    """What the threads share: one place for each rank's call and payload, and the barrier around them.

    Python's own `threading.Barrier` fails a thread that is slow to leave if another one has left and aborted meanwhile.
    Here, as between processes, a barrier that all ranks have reached is complete.
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
        self.abort()  # also after the timeout, for the ranks that still wait
        raise PeerFailed(
            f"While this worker was in {doing}, another one aborted, failed or did not arrive within "
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
    """One rank's end of a `Collective` between threads; `thread_collectives` makes all of them."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self._rank = rank
        self._size = size
        self._table = table
        self.bytes_sent, self.waited_s = 0, 0.0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: threads share all of it anyway."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same tensor object on every rank."""
        mine = torch.zeros(numel if self.rank == 0 else 0, dtype=dtype)
        return self._exchange(f"allocate_shared of {numel} {_name(dtype)}", mine)[0]

    def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Add up in rank order, starting from rank 0's term."""
        self.bytes_sent += tensor.nbytes
        term = tensor.detach().clone() if weight == 1.0 else tensor.detach() * weight  # 1.0 would round integers
        terms = self._exchange(f"all_reduce_ of {_describe(tensor)}", term)
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
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        tensors = self._exchange(f"broadcast_ of {_describe(tensor)} from rank {source}", tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(tensors[source])

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.bytes_sent += len(payload)
        return self._exchange("all_gather", payload)

    def barrier(self) -> None:
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
        """Break the barrier, and those of the collectives split from it."""
        self._table.abort()

    def close(self) -> None: ...

    def _exchange(self, call: str, payload: Result) -> list[Result]:
        """Every rank's payload in rank order, if all ranks made the same call."""
        table = self._table
        table.calls[self._rank] = call
        table.payloads[self._rank] = payload
        table.wait(call)
        calls = list(table.calls)
        payloads: list[Result] = list(table.payloads)  # type: ignore[arg-type]  # the same call puts the same type
        table.wait(call)  # only now may a fast rank overwrite its entry with its next call
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

    def run(rank: int) -> Result:
        try:
            return work(collectives[rank])
        except BaseException:
            collectives[rank].abort()
            raise

    return call_on_threads(size, run)


def call_on_threads(size: int, work: Callable[[int], Result]) -> list[Result]:
    """Run `work(rank)` once for each rank, all at the same time; the results in rank order, or the first cause."""
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(r,), daemon=True, name=f"rank {r}") for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # PeerFailed is a consequence: prefer its cause, even if that was recorded a moment later.
    for failure in sorted(failures, key=lambda f: isinstance(f, PeerFailed)):
        raise failure
    return [results[rank] for rank in range(size)]


@contextmanager
def servers_on_threads(
    shards: int, size: int, *, share_memory: bool = True, served: list[Served] | None = None, timeout_s: float = 20.0
) -> Iterator[Callable[[int], ParameterServers]]:
    """A function that connects the worker of a rank to parameter servers, one per shard; `served` gets their ends."""
    secret = secrets.token_bytes(32)
    addresses = [""] * shards
    is_ready = [threading.Event() for _ in range(shards)]
    is_over = threading.Event()
    failures: list[BaseException] = []

    def run(index: int) -> None:
        def on_ready(address: str) -> None:
            addresses[index] = address
            is_ready[index].set()

        try:
            end = serve(
                "127.0.0.1",
                secret,
                shard_index=index,
                shards=shards,
                size=size,
                on_ready=on_ready,
                should_stop=is_over.is_set,
            )
            if served is not None:
                served.append(end)
        except BaseException as failure:
            failures.append(failure)
            is_ready[index].set()

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True, name=f"syncline-test-shard-{i}") for i in range(shards)
    ]
    for thread in threads:
        thread.start()
    try:
        for event in is_ready:
            if not event.wait(timeout_s):
                raise TimeoutError(f"A server was not ready within {timeout_s:g} s.")
        if not failures:
            yield lambda rank: ParameterServers(
                addresses, secret, rank=rank, size=size, timeout_s=timeout_s, share_memory=share_memory
            )
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    for failure in failures:
        raise failure


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {_name(tensor.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
