"""How fast workers of one host add up their gradients: shared memory, against gloo and against copying memory.

Here: real processes, one thread each, that call the collectives as training does: on a tensor that lies in shared
memory from the start (`SharedMemory`), and on ordinary memory (gloo's all_reduce). Beside them the least that any of it
could cost: each process copies as many bytes from one place to another. Not here: training (`overhead.py`), servers
(`servers.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.piped import LIMIT_S, hear, piped
from syncline.bench.servers import LARGE, SMALL
from syncline.bench.statistics import quantile
from syncline.comms.layout import ControlLayout
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.store import connect_store, host_store

__all__ = ["Measure", "ring", "suites"]

Measure = Callable[[str, int, int], float]
"""Called with a way, a number of values and how often: the median time in seconds, of the slowest process."""

_HOST = "127.0.0.1"
_WAYS = {
    "gloo": "all_reduce of torch.distributed, through loopback.",
    "shared memory": "Syncline's sum_, on tensors that lie in shared memory.",
    "copying": "Each process copies as many bytes, all at the same time.",
}
_TIMES_GLOO = {2: 20, 4: 10}
"""So many times faster than gloo shared memory is to be, with so many processes."""
_TIMES_COPYING = 1.5


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """Gradients of 1.72 MB and of 100 MB, with 2 and with 4 processes."""
    repeats = 1 if settings.quick else 10
    for size in (2, 4):
        settings.say(f"Starting {size} processes.")
        with ring(size) as measure:
            yield _suite(measure, size, SMALL, times=50, rounds_per_repeat=repeats)
            yield _suite(measure, size, LARGE, times=3, rounds_per_repeat=repeats)


def _suite(measure: Measure, size: int, numel: int, *, times: int, rounds_per_repeat: int) -> Suite:
    is_large = numel == LARGE
    megabytes = 4 * numel / 1e6
    return Suite(
        name=f"allreduce-{megabytes:.3g}MB-{size}",
        measures=f"{size} processes add up {megabytes:.3g} MB each, so that all have the sum: the median of {times}.",
        unit="ms",
        baseline="copying" if is_large else "gloo",
        contenders=tuple(
            Contender(name=way, measure=_in_ms(measure, way, numel, times), what=what) for way, what in _WAYS.items()
        ),
        goals=(Goal(contender="shared memory", limit=_TIMES_COPYING if is_large else 1 / _TIMES_GLOO[size]),),
        rounds_per_repeat=rounds_per_repeat,
    )


def _in_ms(measure: Measure, way: str, numel: int, times: int) -> Callable[[], float]:
    return lambda: 1e3 * measure(way, numel, times)


@contextmanager
def ring(size: int) -> Iterator[Measure]:
    """Processes that can exchange in every way."""
    store, port = host_store(_HOST)
    control = Segment.create(ControlLayout(size).total_bytes, "syncline-bench")
    with closing(store), ExitStack() as stack:
        pipes = [stack.enter_context(piped(_rank, port, control.address, rank, size)) for rank in range(size)]

        def measure(way: str, numel: int, times: int) -> float:
            for pipe in pipes:
                pipe.send((way, numel, times))
            return float(max(hear(pipe) for pipe in pipes))

        try:
            yield measure
        finally:
            control.close_descriptor()


def _rank(pipe: Connection, port: int, address: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=LIMIT_S)
    store = connect_store(_HOST, port, "bench", LIMIT_S)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    shared = SharedMemory(Segment.attach(address), rank=rank, size=size, timeout_s=LIMIT_S)
    tensors: dict[int, torch.Tensor] = {}
    while True:
        try:
            way, numel, times = pipe.recv()
        except EOFError:
            break
        if numel not in tensors:
            tensors[numel] = shared.allocate(numel, torch.float32, torch.device("cpu")).fill_(1.0)
        pipe.send(_median_s(_call(way, tensors[numel], shared, 1 / size), shared, times))
    shared.close()
    torch.distributed.destroy_process_group()


def _call(way: str, tensor: torch.Tensor, shared: SharedMemory, weight: float) -> Callable[[], object]:
    """What is measured. The weight keeps the values what they are, time after time."""
    if way == "shared memory":
        return lambda: shared.sum_(tensor, weight)
    ordinary = tensor.clone()
    if way == "gloo":
        # It has no weights; the sums grow, but there is time until they are infinite.
        return lambda: torch.distributed.all_reduce(ordinary)
    other = torch.empty_like(ordinary)
    return lambda: other.copy_(ordinary)


def _median_s(call: Callable[[], object], shared: SharedMemory, times: int) -> float:
    taken = []
    for number in range(times + 1):
        shared.barrier()  # all begin at the same time
        start = time.perf_counter()
        call()
        if number:  # the first one touches new memory
            taken.append(time.perf_counter() - start)
    return quantile(taken, 0.5)
