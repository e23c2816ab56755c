"""What gloo does not do by itself: give up when there is nobody to wait for, and start again after a failure.

In processes of their own, because a call that is left behind stays in its process for a while.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BEGIN = """
import os, random, signal, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from syncline.comms.process_group import ProcessGroup
from syncline.comms.store import connect_store, host_store
from syncline.errors import PeerFailed

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
host, port = host_store("127.0.0.1", b"secret")

def store(name):
    return connect_store("127.0.0.1", port, name, 60, b"secret")

def group(name, rank, size, should_stop=lambda: False):
    return ProcessGroup(
        store(name), rank=rank, size=size, device=torch.device("cpu"), timeout_s=60, should_stop=should_stop
    )

def in_a_process(work):
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid

def succeed(pids):
    assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in pids)
"""


def run(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_rank_that_dies_while_the_others_connect_holds_nobody_up_and_they_can_meet_again_without_it():
    run("""
def be_lost():
    mine = store("first")
    mine.set("here/1", "")
    dist.ProcessGroupGloo(mine, 1, 2, timedelta(seconds=60))

def survive():
    told = threading.Event()
    lost = in_a_process(be_lost)
    watch = store("first")
    while watch.num_keys() < 2:  # that it is here, and where it listens
        told.wait(0.01)
    os.kill(lost, signal.SIGKILL)
    os.waitpid(lost, 0)
    threading.Timer(0.5, told.set).start()
    began = time.monotonic()
    try:
        group("first", 0, 2, told.is_set)
        raise AssertionError("connected to the dead")
    except PeerFailed:
        assert time.monotonic() - began < 5, "gloo may wait for it to connect, or be refused at once"
    meet_again(0)

def meet_again(rank):
    again = group("second", rank, 2)
    value = torch.ones(3)
    again.all_reduce_(value)
    assert value.tolist() == [2, 2, 2]
    again.close()

succeed([in_a_process(survive), in_a_process(lambda: meet_again(1))])
""")


@pytest.mark.parametrize("call", ["all_reduce_(tensor)", "mix_(tensor, {0: {0: 0.5, 1: 0.5}, 1: {0: 0.5, 1: 0.5}})"])
def test_whenever_an_exchange_is_aborted_both_ends_get_away_from_it_and_can_begin_another(call):
    run(f"""
def train(rank, number):
    mine = group(f"before-{{number}}", rank, 2)
    # The first to hear of it ends its connections in the middle of the other's call.
    moment = random.Random(number).uniform(0.01, 0.05)
    threading.Timer(moment + (0.2 if rank == 0 else 0), mine.abort).start()
    tensor = torch.ones(1000)
    try:
        while True:
            began = time.monotonic()
            mine.{call}
    except PeerFailed:
        assert time.monotonic() - began < 5
    began = time.monotonic()
    mine.close()
    assert time.monotonic() - began < 1, "nobody waits for what was left behind"
    again = group(f"after-{{number}}", rank, 2)
    again.barrier()
    again.close()

for number in range(8):
    succeed([in_a_process(lambda: train(rank, number)) for rank in range(2)])
""")


def test_once_all_ranks_are_connected_no_one_else_can_connect_and_all_of_them_still_exchange():
    run("""
import socket
from syncline.comms.open_sockets import listeners

os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # a user's setting with which ranks would connect when they first exchange
everyone = {r: {s: 1 / 3 for s in range(3)} for r in range(3)}

def closed_ports():
    ports = {found.getsockname()[1] for _, found in listeners()} - {port}  # the store's is inherited
    for each in ports:
        try:
            socket.create_connection(("127.0.0.1", each), timeout=0.1)
            raise AssertionError(f"port {each} is open")
        except TimeoutError:
            pass
    return len(ports)

def exchange(mine, count):
    tensor = torch.full((5,), float(mine.rank))
    mine.mix_(tensor, everyone if count == 3 else {0: {0: 0.5, 1: 0.5}, 1: {0: 0.5, 1: 0.5}})
    assert torch.allclose(tensor, torch.full((5,), (count - 1) / 2)), "every rank takes from every other"
    mine.all_reduce_(tensor)
    mine.barrier()

def train(rank):
    for view in range(3):  # after a failure, a new group is formed in the same process
        mine = group(f"view-{view}", rank, 3)
        assert closed_ports() == 1
        exchange(mine, 3)
        child = mine.split(int(rank == 2))
        if rank < 2:
            assert closed_ports() == 2
            exchange(child, 2)
        exchange(mine, 3)
        mine.close()

succeed([in_a_process(lambda: train(rank)) for rank in range(3)])
""")
