"""The `syncline` backend of torch.distributed does what gloo does, in real processes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import (
    LIMIT_S,
    Died,
    RankProcesses,
    children,
    mapped_segments,
    named_segments,
    start_fork_server,
    stop_fork_server,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline.comms import posts, torch_backend
from syncline.comms.store import connect_store, host_store

pytestmark = pytest.mark.xdist_group("torch-backend")  # one process, because these tests share a fixture

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
SIZES = [0, 1, 7, 1000, 70_001]


class Groups:
    """torch.distributed in this process: the default group is Syncline's, `gloo` is the one to compare it with."""

    def __init__(self, port: int, secret: bytes, size: int, rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch_backend.register()
        self.store = connect_store("127.0.0.1", port, "test", LIMIT_S, secret)
        dist.init_process_group("syncline", store=self.store, rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.ours = dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo")

    def close(self) -> None:
        dist.destroy_process_group()
        self.store.close()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    gc.collect()
    before = children(), named_segments()
    start_fork_server()
    yield
    stop_fork_server()
    assert children() <= before[0]
    assert named_segments() <= before[1]


@pytest.fixture(scope="module")
def ranks(_nothing_is_left_behind: None) -> Iterator[dict[int, RankProcesses]]:
    processes = {size: RankProcesses(size) for size in (2, 3)}
    yield processes
    for each in processes.values():
        each.close()


@contextmanager
def opener(size: int) -> Iterator[Callable[[int], Any]]:
    secret = os.urandom(32)
    store, port = host_store("127.0.0.1", secret)
    try:
        yield partial(Groups, port, secret, size)
    finally:
        store.close()


def run(ranks: dict[int, RankProcesses], size: int, work: Callable[[Any], Any]) -> list[Any]:
    with opener(size) as opened:
        return ranks[size].run(opened, work)


def values(dtype: torch.dtype, numel: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return (4 * torch.randn(numel, generator=generator)).abs().add(1).to(dtype)


def all_reduce(group: Any, mine: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    results = []
    operations = [dist.ReduceOp.SUM]
    if not mine.is_complex():
        operations += [dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    for operation in operations:
        results.append(mine.clone())
        dist.all_reduce(results[-1], operation, group=group)
    return results


def broadcast(group: Any, mine: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    results = [mine.clone() for _ in range(size)]
    for source, tensor in enumerate(results):
        dist.broadcast(tensor, source, group=group)
    return results


def all_gather(group: Any, mine: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    results = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(results, mine, group=group)
    return results


def all_gather_into_tensor(group: Any, mine: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    result = mine.new_empty(size * mine.numel())
    dist.all_gather_into_tensor(result, mine, group=group)
    return [result]


def reduce_scatter(group: Any, mine: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    result, flat = torch.empty_like(mine), torch.empty_like(mine)
    dist.reduce_scatter(result, [mine + i for i in range(size)], group=group)
    dist.reduce_scatter_tensor(flat, torch.cat([mine + i for i in range(size)]), group=group)
    return [result, flat]


def rare_calls(group: Any, mine: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """Those that are left to gloo."""
    reduced, scattered, received = mine.clone(), torch.empty_like(mine), torch.empty_like(mine)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    swapped = [torch.empty_like(mine) for _ in range(size)]
    dist.reduce(reduced, 0, group=group)
    dist.gather(mine, gathered if rank == 0 else None, 0, group=group)
    dist.scatter(scattered, [mine + i for i in range(size)] if rank == 0 else None, 0, group=group)
    dist.all_to_all(swapped, [mine + i for i in range(size)], group=group)
    if rank == 0:
        dist.send(mine, 1, group=group)
    elif rank == 1:
        dist.recv(received, 0, group=group)
    return [scattered, *swapped, *([*gathered, reduced] if rank == 0 else []), *([received] if rank == 1 else [])]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "call", [all_reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter], ids=lambda call: call.__name__
)
def test_every_collective_gives_what_gloo_gives(ranks, call, size):
    def work(groups: Groups) -> list[str]:
        different = []
        for dtype in DTYPES:
            for numel in SIZES:
                mine = values(dtype, numel, groups.rank)
                ours = call(groups.ours, mine, groups.rank, groups.size)
                theirs = call(groups.gloo, mine, groups.rank, groups.size)
                # In what order gloo adds up the values of three ranks is its own affair.
                slack = {"rtol": 0, "atol": 0} if groups.size == 2 else {"rtol": 0.02, "atol": 0.1}
                if not all(torch.allclose(a, b, **slack) for a, b in zip(ours, theirs, strict=True)):
                    different.append(f"{dtype} {numel}")
        return different

    assert run(ranks, size, work) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_what_shared_memory_does_not_do_is_left_to_gloo(ranks, size):
    def work(groups: Groups) -> list[bool]:
        mine = values(torch.float32, 100, groups.rank)
        ours = rare_calls(groups.ours, mine, groups.rank, groups.size)
        theirs = rare_calls(groups.gloo, mine, groups.rank, groups.size)
        sparse = torch.eye(3).mul(groups.rank + 1).to_sparse()
        dist.all_reduce(sparse)
        strided = torch.arange(12.0).view(3, 4).t().contiguous().t()
        objects: list[Any] = [None] * groups.size
        dist.all_gather_object(objects, {"rank": groups.rank})
        shared = [f"from {groups.rank}"]
        dist.broadcast_object_list(shared, 1)
        total = groups.size * (groups.size + 1) / 2
        return [
            *(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
            torch.equal(sparse.to_dense(), total * torch.eye(3)),
            not strided.is_contiguous(),
            objects == [{"rank": r} for r in range(groups.size)],
            shared == ["from 1"],
        ]

    assert all(all(answers) for answers in run(ranks, size, work))


def test_a_tensor_larger_than_a_post_goes_in_parts(ranks):
    def work(groups: Groups) -> list[bool]:
        numel = posts.LARGEST_BYTES + 1000
        summed = torch.full((numel,), groups.rank + 1, dtype=torch.uint8)
        summed[-1] = 7
        dist.all_reduce(summed)
        sent = torch.arange(numel, dtype=torch.int64).to(torch.uint8) if groups.rank == 1 else summed.clone()
        dist.broadcast(sent, 1)
        gathered = torch.empty(2 * numel, dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, sent)
        return [
            bool((summed[:-1] == 3).all()) and int(summed[-1]) == 14,
            torch.equal(sent, torch.arange(numel, dtype=torch.int64).to(torch.uint8)),
            torch.equal(gathered[:numel], sent) and torch.equal(gathered[numel:], sent),
        ]

    assert run(ranks, 2, work) == [[True] * 3] * 2


def test_calls_in_progress_may_be_many_and_are_awaited_in_any_order(ranks):
    def work(groups: Groups) -> list[Any]:
        tensors = [torch.full((n * 1000,), float(n + groups.rank)) for n in range(1, 60)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if groups.rank == 0:  # a rank that has only begun its calls does not keep the others from theirs
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)
        for each in reversed(works):
            each.wait()
        last = torch.ones(3)
        future = dist.all_reduce(last, async_op=True).get_future()
        return [
            all(bool((t == 2 * n + 1).all()) for n, t in enumerate(tensors, 1)),
            all(each.is_completed() for each in works),
            torch.equal(future.wait()[0], torch.full((3,), 2.0)),
        ]

    assert run(ranks, 2, work) == [[True] * 3] * 2


def average_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """The average, through a future, as DDP's own hooks compute it."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"hook": True}],
    ids=["plain", "many buckets", "unused parameters", "bucket views", "communication hook"],
)
def test_ddp_trains_the_same_bits_as_with_gloo(ranks, options):
    def train(groups: Groups, group: Any) -> list[torch.Tensor]:
        torch.manual_seed(groups.rank)  # DDP broadcasts rank 0's parameters
        net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())))
        settings = {name: value for name, value in options.items() if name != "hook"}
        model = DistributedDataParallel(net, process_group=group, **settings)
        if options.get("hook"):
            model.register_comm_hook(group, average_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 32)).pow(2).mean().backward()
            optimizer.step()
        return [p.detach() for p in [*net.parameters(), *net.buffers()]]

    def work(groups: Groups) -> list[torch.Tensor]:
        ours, theirs = train(groups, groups.ours), train(groups, groups.gloo)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        return ours

    first, second = run(ranks, 2, work)
    parameters = 6 * 4
    assert all(torch.equal(a, b) for a, b in zip(first[:parameters], second[:parameters], strict=True))


def test_a_subgroup_and_a_group_of_one_work(ranks):
    def work(groups: Groups) -> list[float]:
        pair = dist.new_group([0, 2])
        alone = [dist.new_group([r]) for r in range(3)][groups.rank]
        value = torch.tensor([float(groups.rank + 1)])
        if groups.rank != 1:
            dist.all_reduce(value, group=pair)
        dist.all_reduce(value, group=alone)
        dist.barrier()
        return [float(value), dist.get_world_size(alone)]

    assert run(ranks, 3, work) == [[4.0, 1], [2.0, 1], [4.0, 1]]


def test_without_memory_to_share_gloo_does_it_all(ranks):
    def work(groups: Groups) -> list[Any]:
        before = posts.memory_available
        posts.memory_available = lambda: 20_000_000
        try:
            large, small = torch.ones(6_000_000), torch.ones(10)
            dist.all_reduce(large)
            dist.all_reduce(small)
        finally:
            posts.memory_available = before
        return [bool((large == 2).all()), bool((small == 2).all())]

    assert run(ranks, 2, work) == [[True, True]] * 2


def test_ranks_that_make_different_calls_get_an_error_that_names_both(ranks):
    def work(groups: Groups) -> str:
        dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(4 if groups.rank else 5))
        return str(raised.value)

    for message in run(ranks, 2, work):
        assert "16 bytes" in message
        assert "20 bytes" in message


def test_a_rank_that_waits_for_one_that_left_gets_an_error(ranks):
    def work(groups: Groups) -> bool:
        dist.barrier()
        if groups.rank == 1:
            groups.ours.leave()
            return True
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.all_reduce(torch.ones(2))
        return True

    assert run(ranks, 2, work) == [True, True]


def test_a_rank_that_waits_for_one_that_was_killed_gets_an_error():
    def work(groups: Groups) -> bool:
        dist.barrier()
        if groups.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.all_reduce(torch.ones(2))
        return True

    processes = RankProcesses(2)
    try:
        with opener(2) as opened:
            first, second = processes.answers(opened, work)
    finally:
        processes.close()
    assert first is True
    assert isinstance(second, Died)


def test_a_closed_group_leaves_no_memory_mapped(ranks):
    def use(groups: Groups) -> None:
        dist.all_reduce(torch.ones(100_000))

    run(ranks, 2, use)
    assert ranks[2].run(lambda rank: NotDistributed(), lambda _: (gc.collect(), mapped_segments())[1]) == [0, 0]


class NotDistributed:
    def close(self) -> None: ...
