"""All-reduce on one host: shared memory beside gloo and beside copying memory.

Here: real processes, one thread each, that call the collectives as training does: on a tensor allocated in shared
memory (`SharedMemory`), and on ordinary memory (gloo's all_reduce). Beside them the lower bound: each process copies
the same number of bytes. Not here: training (`overhead.py`), servers (`servers.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection

import torch
import torch.distributed

from syncline.comms.segment import ControlLayout, Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.store import host_store
from syncline.lab.bench.child_process import LIMIT_S, child_process, join_gloo, receive
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.servers import LARGE, SMALL
from syncline.lab.statistics import quantile

Measure = Callable[[str, int, int], float]
"""Called with a method, a number of values and of calls: the median time of the slowest process, in seconds."""

_HOST = "127.0.0.1"
_METHODS = {
    "gloo": "all_reduce of torch.distributed, over loopback.",
    "shared memory": "Syncline's all_reduce_, on tensors in shared memory.",
    "copying": "Each process copies the same number of bytes, all at the same time.",
}
_TIMES_GLOO = {2: 20, 4: 10}
"""Goal: speedup over gloo, by number of processes."""
_TIMES_COPYING = 1.5


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
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
        measures=f"{size} processes all-reduce {megabytes:.3g} MB each: the median of {times}.",
        unit="ms",
        baseline="copying" if is_large else "gloo",
        contenders=tuple(
            Contender(name=method, measure=_in_ms(measure, method, numel, times), what=what)
            for method, what in _METHODS.items()
        ),
        goals=(Goal(contender="shared memory", limit=_TIMES_COPYING if is_large else 1 / _TIMES_GLOO[size]),),
        rounds_per_repeat=rounds_per_repeat,
    )


def _in_ms(measure: Measure, method: str, numel: int, times: int) -> Callable[[], float]:
    return lambda: 1e3 * measure(method, numel, times)


@contextmanager
def ring(size: int) -> Iterator[Measure]:
    """Processes that all-reduce with each method."""
    store, port = host_store(_HOST)
    control = Segment.create(ControlLayout(size).total_bytes, "syncline-bench")
    with closing(store), ExitStack() as stack:
        pipes = [stack.enter_context(child_process(_rank, port, control.address, rank, size)) for rank in range(size)]

        def measure(method: str, numel: int, times: int) -> float:
            for pipe in pipes:
                pipe.send((method, numel, times))
            return float(max(receive(pipe) for pipe in pipes))

        try:
            yield measure
        finally:
            control.close_descriptor()


def _rank(pipe: Connection, port: int, address: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    join_gloo(port, rank, size)
    shared = SharedMemory(Segment.attach(address), rank=rank, size=size, timeout_s=LIMIT_S)
    tensors: dict[int, torch.Tensor] = {}
    while True:
        try:
            method, numel, times = pipe.recv()
        except EOFError:
            break
        if numel not in tensors:
            tensors[numel] = shared.allocate(numel, torch.float32, torch.device("cpu")).fill_(1.0)
        pipe.send(_median_s(_call(method, tensors[numel], shared, 1 / size), shared, times))
    shared.close()
    torch.distributed.destroy_process_group()


def _call(method: str, tensor: torch.Tensor, shared: SharedMemory, weight: float) -> Callable[[], object]:
    """The measured call. The weight keeps the values constant from call to call."""
    if method == "shared memory":
        return lambda: shared.all_reduce_(tensor, weight)
    ordinary = tensor.clone()
    if method == "gloo":
        # It takes no weight; the sums grow, but stay finite for long enough.
        return lambda: torch.distributed.all_reduce(ordinary)
    other = torch.empty_like(ordinary)
    return lambda: other.copy_(ordinary)


def _median_s(call: Callable[[], object], shared: SharedMemory, times: int) -> float:
    taken = []
    for number in range(times + 1):
        shared.barrier()  # all start at the same time
        start = time.perf_counter()
        call()
        if number:  # the first one touches fresh memory
            taken.append(time.perf_counter() - start)
    return quantile(taken, 0.5)
