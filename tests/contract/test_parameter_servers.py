"""Parameter servers keep the contract: in threads and processes, through shared memory and sockets."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from rank_processes import start_fork_server, stop_fork_server

from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.server import serve
from syncline.testing import server_contract as contract
from syncline.testing.threads import servers_on_threads
from syncline.workers.quick_start import without_compiler

LIMIT_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def _helpers() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    start_fork_server()
    yield
    stop_fork_server()
    torch.set_num_threads(before)


@pytest.mark.parametrize("check", contract.CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "sockets"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_contract(check, share_memory, shards):
    check(partial(servers_on_threads, shards, share_memory=share_memory))


@pytest.mark.parametrize("check", contract.CONTRACT, ids=lambda check: check.__name__)
def test_contract_in_processes(check):
    check(partial(servers_in_processes, 2))


@contextmanager
def servers_in_processes(shards: int, size: int) -> Iterator[contract.Connect]:
    context = multiprocessing.get_context("forkserver")
    secret = secrets.token_bytes(32)
    pipes, processes, addresses = [], [], []
    try:
        for index in range(shards):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, secret, index, shards, size), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            assert pipe.poll(LIMIT_S)
            addresses.append(pipe.recv())
        yield lambda rank: ParameterServers(addresses, secret, rank=rank, size=size, timeout_s=LIMIT_S)
    finally:
        for pipe in pipes:
            pipe.close()  # which tells a server to stop
        for process in processes:
            process.join(LIMIT_S)
    assert [p.exitcode for p in processes] == [0] * shards


def _serve(pipe: Any, secret: bytes, index: int, shards: int, size: int) -> None:
    torch.set_num_threads(1)
    without_compiler()  # a new process would spend seconds on loading it for its first step
    serve("127.0.0.1", secret, shard_index=index, shards=shards, size=size, on_ready=pipe.send, should_stop=pipe.poll)


def test_a_check_notices_a_broken_promise():
    class AddsTwice(ParameterServers):
        def push(self, flat, **how):
            super().push(flat, **how)
            super().push(flat, **how)

    @contextmanager
    def start(size):
        with servers_on_threads(1, size) as connect:

            def broken(rank):
                servers = connect(rank)
                servers.__class__ = AddsTwice
                return servers

            yield broken

    with pytest.raises(AssertionError, match=r"breaks the contract.*SGD"):
        contract.pushes_in_turn_equal_one_optimizer(start)
