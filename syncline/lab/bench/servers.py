"""Parameter servers: round trips (push a gradient, pull parameters) and updates per second.

Here: real server processes, reached through mailboxes (shared memory) and through sockets. The baseline of the round
trip is a hand-written server: `send` and `recv` of torch.distributed (gloo) between two processes, one of which applies
the gradient; beside it, the same without the update. The baseline of updates per second is the optimizer alone, in one
process, without communication. Not here: training with servers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import nn

from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.server import serve
from syncline.comms.store import host_store
from syncline.lab.bench.child_process import LIMIT_S, child_process, join_gloo, receive
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.overhead import as_in_a_worker
from syncline.lab.statistics import quantile
from syncline.workers.quick_start import without_compiler

SMALL = 430_000  # parameters: 1.72 MB, about ResNet-20 or LeNet
LARGE = 25_000_000  # 100 MB, about ResNet-50
_HOST = "127.0.0.1"
_LR, _MOMENTUM = 0.01, 0.9


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Latency at 1.72 MB, throughput at 100 MB, updates per second."""
    with as_in_a_worker(), ExitStack() as stack:
        settings.say("Starting servers and a pair of gloo processes.")
        gloo = stack.enter_context(gloo_pair())
        clients = {shares: stack.enter_context(_client(shares)) for shares in (True, False)}
        repeats = 1 if settings.quick else 10
        yield round_trips("servers-round-trip", SMALL, gloo, clients, trips=20, rounds_per_repeat=repeats, in_ms=True)
        yield round_trips("servers-throughput", LARGE, gloo, clients, trips=2, rounds_per_repeat=repeats, in_ms=False)
        for client in clients.values():
            client.begin([], torch.optim.SGD([torch.zeros(1)]), rule="apply")  # frees its memory
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
    """Push a gradient of `numel` values and pull the parameters, beside the same bytes through gloo."""
    gigabytes = 8 * numel / 1e9

    def shown(seconds: float) -> float:
        return 1e3 * seconds if in_ms else gigabytes / seconds

    unit = "ms" if in_ms else "GB/s"
    bound: Any = "at most" if in_ms else "at least"
    return Suite(
        name=name,
        measures=f"Round trip: {4 * numel / 1e6:g} MB of gradients to another process, which applies them (SGD), and "
        f"the parameters back; the median of {trips}" + ("." if in_ms else ", as bytes per second in both directions."),
        unit=unit,
        baseline="gloo with update",  # the same bytes and the same computation
        contenders=(
            Contender(
                name="gloo",
                measure=lambda: shown(gloo(numel, trips, False)),
                what="send and recv of torch.distributed, without an update.",
            ),
            Contender(
                name="gloo with update",
                measure=lambda: shown(gloo(numel, trips, True)),
                what="The same, and the other process applies the gradient: a hand-written server.",
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
    """Gradients that one server receives and applies per second."""
    return Suite(
        name="servers-updates",
        measures=f"Gradients of {4 * numel / 1e6:g} MB, applied with momentum SGD by one server, from 2 workers that "
        f"only push: updates per second over {pushes} pushes of each.",
        unit="updates/s",
        baseline="optimizer alone",
        contenders=(
            Contender(
                name="optimizer alone",
                measure=lambda: _optimizer_alone(numel, pushes),
                what="torch.optim.SGD in one process with a constant gradient, without communication.",
            ),
            Contender(name="mailboxes", measure=lambda: rigs[True](numel, pushes), what="Through shared memory."),
            Contender(name="sockets", measure=lambda: rigs[False](numel, pushes), what="Through TCP."),
        ),
        rounds_per_repeat=rounds_per_repeat,
    )


def _round_trip(client: ParameterServers, numel: int, trips: int) -> float:
    """The median time of one round trip, in seconds."""
    if not client.ranges or client.ranges[-1][1] != numel:
        parameter = nn.Parameter(torch.zeros(numel))
        client.begin([parameter], torch.optim.SGD([parameter], lr=_LR), rule="apply")
    gradient, out = torch.ones(numel), torch.ones(numel)
    times = []
    for number in range(trips + 1):
        start = time.perf_counter()
        client.push(gradient, weight=1.0)
        client.pull(out)
        if number:  # the first one touches fresh memory
            times.append(time.perf_counter() - start)
    return quantile(times, 0.5)


def _optimizer_alone(numel: int, steps: int) -> float:
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
    with child_process(_serve, secret, size) as pipe:
        yield receive(pipe)


def _serve(pipe: Connection, secret: bytes, size: int) -> None:
    torch.set_num_threads(1)
    without_compiler()
    # The pipe becomes readable when the parent closes it, and only then.
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
    """A server and two workers; called with a number of parameters and of pushes, returns updates per second."""
    secret = secrets.token_bytes(32)
    with _server(secret, 2) as address, ExitStack() as stack:
        pipes = [stack.enter_context(child_process(_push, address, secret, rank, shares_memory)) for rank in range(2)]

        def measure(numel: int, pushes: int) -> float:
            for pipe in pipes:
                pipe.send((numel, pushes))
            spans = [receive(pipe) for pipe in pipes]
            # All processes of a host share this clock: from the first push of a worker to the last update.
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
            own.pull(out, ranges=[(0, 1)])  # returns when all pushes are applied
            pipe.send((start, time.monotonic()))


@contextmanager
def gloo_pair() -> Iterator[Callable[[int, int, bool], float]]:
    """Two processes; called with a number of values, of trips and whether to update, returns the median trip."""
    store, port = host_store(_HOST)
    with ExitStack() as stack:
        pipes = [stack.enter_context(child_process(_gloo, port, rank)) for rank in range(2)]

        def measure(numel: int, trips: int, has_update: bool) -> float:
            for pipe in pipes:
                pipe.send((numel, trips, has_update))
            median, _ = [receive(pipe) for pipe in pipes]
            return float(median)

        yield measure
    del store  # must live as long as the pair


def _gloo(pipe: Connection, port: int, rank: int) -> None:
    torch.set_num_threads(1)
    join_gloo(port, rank, 2)
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
