"""How fast parameter servers are: a gradient there and parameters back, and updates a second.

Here: real servers in processes of their own, through mailboxes (shared memory) and through sockets only. For the round
trip the baseline is a server written by hand: `send` and `recv` of torch.distributed (gloo) between two processes, one
of which applies the gradient; the same without applying anything is shown beside it. For updates a second the
baseline is the optimiser alone, in one process, with nothing sent at all. Not here: training with servers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import nn

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.overhead import as_in_a_worker
from syncline.bench.piped import LIMIT_S, hear, piped
from syncline.bench.statistics import quantile
from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.server import serve
from syncline.comms.store import connect_store, host_store
from syncline.workers.quick_start import without_compiler

__all__ = ["LARGE", "SMALL", "gloo_pair", "round_trips", "suites", "updates", "update_rig"]

SMALL = 430_000  # parameters: 1.72 MB, about ResNet-20 or LeNet
LARGE = 25_000_000  # 100 MB, about ResNet-50
_HOST = "127.0.0.1"
_LR, _MOMENTUM = 0.01, 0.9


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """Latency at 1.72 MB, throughput at 100 MB, updates a second."""
    with as_in_a_worker(), ExitStack() as stack:
        settings.say("Starting servers and a pair of gloo processes.")
        gloo = stack.enter_context(gloo_pair())
        clients = {shares: stack.enter_context(_client(shares)) for shares in (True, False)}
        repeats = 1 if settings.quick else 10
        yield round_trips("servers-round-trip", SMALL, gloo, clients, trips=20, rounds_per_repeat=repeats, in_ms=True)
        yield round_trips("servers-throughput", LARGE, gloo, clients, trips=2, rounds_per_repeat=repeats, in_ms=False)
        for client in clients.values():
            client.begin([], torch.optim.SGD([torch.zeros(1)]), rule="apply")  # gives the memory back
        rigs = {shares: stack.enter_context(update_rig(shares)) for shares in (True, False)}
        yield updates(SMALL, rigs, pushes=50 if settings.quick else 200, rounds_per_repeat=repeats)


def round_trips(
    name: str,
    numel: int,
    gloo: Callable[[int, int, bool], float],
    clients: dict[bool, ParameterServers],
    *,
    trips: int,
    rounds_per_repeat: int,
    in_ms: bool,
) -> Suite:
    """Push a gradient of `numel` values and pull the parameters, against the same bytes through gloo."""
    gigabytes = 8 * numel / 1e9

    def shown(seconds: float) -> float:
        return 1e3 * seconds if in_ms else gigabytes / seconds

    unit = "ms" if in_ms else "GB/s"
    bound: Any = "at most" if in_ms else "at least"
    return Suite(
        name=name,
        measures=f"{4 * numel / 1e6:g} MB to another process, which applies it to as many parameters (SGD), and those "
        f"back: the median of {trips} round trips" + ("." if in_ms else ", as bytes in both directions a second."),
        unit=unit,
        baseline="gloo with update",  # like with like: the bytes and what is done with them
        contenders=(
            Contender(
                name="gloo",
                measure=lambda: shown(gloo(numel, trips, False)),
                what="send and recv of torch.distributed, nothing computed in between.",
            ),
            Contender(
                name="gloo with update",
                measure=lambda: shown(gloo(numel, trips, True)),
                what="The same, and the other process adds the gradient to parameters: a server written by hand.",
            ),
            Contender(
                name="mailboxes",
                measure=lambda: shown(_round_trip(clients[True], numel, trips)),
                what="ParameterServers.push and pull through shared memory.",
            ),
            Contender(
                name="sockets",
                measure=lambda: shown(_round_trip(clients[False], numel, trips)),
                what="ParameterServers.push and pull through TCP.",
            ),
        ),
        goals=(Goal(contender="mailboxes", limit=1.0, bound=bound), Goal(contender="sockets", limit=1.0, bound=bound)),
        rounds_per_repeat=rounds_per_repeat,
    )


def updates(
    numel: int, rigs: dict[bool, Callable[[int, int], float]], *, pushes: int, rounds_per_repeat: int = 1
) -> Suite:
    """How many gradients one server takes in and applies."""
    return Suite(
        name="servers-updates",
        measures=f"Gradients of {4 * numel / 1e6:g} MB, applied with momentum SGD by one server, from 2 workers that "
        f"only push: updates a second over {pushes} pushes of each.",
        unit="updates/s",
        baseline="optimiser alone",
        contenders=(
            Contender(
                name="optimiser alone",
                measure=lambda: _optimiser_alone(numel, pushes),
                what="torch.optim.SGD in one process, the same gradient every time: nothing is sent.",
            ),
            Contender(name="mailboxes", measure=lambda: rigs[True](numel, pushes), what="Through shared memory."),
            Contender(name="sockets", measure=lambda: rigs[False](numel, pushes), what="Through TCP."),
        ),
        rounds_per_repeat=rounds_per_repeat,
    )


def _round_trip(client: ParameterServers, numel: int, trips: int) -> float:
    """The median time of one, in seconds."""
    if not client.ranges or client.ranges[-1][1] != numel:
        parameter = nn.Parameter(torch.zeros(numel))
        client.begin([parameter], torch.optim.SGD([parameter], lr=_LR), rule="apply")
    gradient, out = torch.ones(numel), torch.ones(numel)
    times = []
    for number in range(trips + 1):
        start = time.perf_counter()
        client.push(gradient, weight=1.0)
        client.pull(out)
        if number:  # the first one touches new memory
            times.append(time.perf_counter() - start)
    return quantile(times, 0.5)


def _optimiser_alone(numel: int, steps: int) -> float:
    parameter = nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.ones(numel)
    optimizer = torch.optim.SGD([parameter], lr=_LR, momentum=_MOMENTUM)
    optimizer.step()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    return steps / (time.perf_counter() - start)


# Processes


@contextmanager
def _server(secret: bytes, size: int) -> Iterator[str]:
    with piped(_serve, secret, size) as pipe:
        yield hear(pipe)


def _serve(pipe: Connection, secret: bytes, size: int) -> None:
    torch.set_num_threads(1)
    without_compiler()
    # The pipe can be read when its other end is gone: nobody writes to it.
    serve(_HOST, secret, shard_index=0, shards=1, size=size, on_ready=pipe.send, should_stop=pipe.poll)


@contextmanager
def _client(shares_memory: bool) -> Iterator[ParameterServers]:
    secret = secrets.token_bytes(32)
    with (
        _server(secret, 1) as address,
        ParameterServers([address], secret, rank=0, size=1, timeout_s=LIMIT_S, share_memory=shares_memory) as client,
    ):
        yield client


@contextmanager
def update_rig(shares_memory: bool) -> Iterator[Callable[[int, int], float]]:
    """A server and two workers; called with the number of parameters and of pushes, tells the updates a second."""
    secret = secrets.token_bytes(32)
    with _server(secret, 2) as address, ExitStack() as stack:
        pipes = [stack.enter_context(piped(_push, address, secret, rank, shares_memory)) for rank in range(2)]

        def measure(numel: int, pushes: int) -> float:
            for pipe in pipes:
                pipe.send((numel, pushes))
            spans = [hear(pipe) for pipe in pipes]
            # One clock for all processes of a host: from the first push of either to the last update of either.
            return float(2 * pushes / (max(end for _, end in spans) - min(start for start, _ in spans)))

        yield measure


def _push(pipe: Connection, address: str, secret: bytes, rank: int, shares_memory: bool) -> None:
    torch.set_num_threads(1)
    with ParameterServers([address], secret, rank=rank, size=2, timeout_s=LIMIT_S, share_memory=shares_memory) as own:
        while True:
            try:
                numel, pushes = pipe.recv()
            except EOFError:
                return
            parameter = nn.Parameter(torch.zeros(numel))
            own.begin([parameter], torch.optim.SGD([parameter], lr=_LR, momentum=_MOMENTUM), rule="apply")
            gradient, out = torch.ones(numel), torch.empty(numel)
            own.push(gradient, weight=1.0)
            own.pull(out)
            start = time.monotonic()
            for _ in range(pushes):
                own.push(gradient, weight=1.0)
            own.pull(out, ranges=[(0, 1)])  # comes back when all is applied
            pipe.send((start, time.monotonic()))


@contextmanager
def gloo_pair() -> Iterator[Callable[[int, int, bool], float]]:
    """Two processes; called with the number of values, of trips and whether to update, tells the median trip."""
    store, port = host_store(_HOST)
    with ExitStack() as stack:
        pipes = [stack.enter_context(piped(_gloo, port, rank)) for rank in range(2)]

        def measure(numel: int, trips: int, has_update: bool) -> float:
            for pipe in pipes:
                pipe.send((numel, trips, has_update))
            median, _ = [hear(pipe) for pipe in pipes]
            return float(median)

        yield measure
    del store  # it must live as long as the pair


def _gloo(pipe: Connection, port: int, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=LIMIT_S)
    store = connect_store(_HOST, port, "bench", LIMIT_S)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    while True:
        try:
            numel, trips, has_update = pipe.recv()
        except EOFError:
            break
        ours, theirs = torch.ones(numel), torch.ones(numel)
        times = []
        for number in range(trips + 1):
            start = time.perf_counter()
            if rank == 0:
                torch.distributed.send(ours, 1)
                torch.distributed.recv(theirs, 1)
            else:
                torch.distributed.recv(theirs, 0)
                if has_update:
                    ours.add_(theirs, alpha=-_LR)
                torch.distributed.send(ours, 0)
            if number:
                times.append(time.perf_counter() - start)
        pipe.send(quantile(times, 0.5))
    torch.distributed.destroy_process_group()
