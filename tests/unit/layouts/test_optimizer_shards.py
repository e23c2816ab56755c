"""Workers that step with parts of the parameters do what one optimizer does with all of them, also if one dies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_allocations import SharedAllocations
from torch import nn

from syncline.errors import ConfigError
from syncline.layouts import optimizer_shards
from syncline.layouts.optimizer_shards import OptimizerShards, check_by_number
from syncline.layouts.shards import pieces_by_rank, whole_leaves
from syncline.models.optimizers import LAMB, LARS, AdaBelief, Lion
from syncline.strategies.flat import FlatParameters, views_of

SIZE = 3
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "belief": lambda p: AdaBelief(p, lr=0.01),
    "lion": lambda p: Lion(p, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return net


class Workers:
    """Some workers in one process, whose allocations are shared in the order of the calls."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        state: dict[str, Any] | None = None,
        *,
        is_confirmed: bool = True,
    ) -> None:
        self.models = [model() for _ in range(SIZE)]
        groups = [
            [{"params": m[0].parameters()}, {"params": [*m[1].parameters(), m.scale], "lr": 0.02}] for m in self.models
        ]  # type: ignore[index]
        self.optimizers = [make(group) for group in groups]
        shared = SharedAllocations()
        flats = [FlatParameters(list(m.parameters())) for m in self.models]
        self.memory, self.gradients = flats[0].read(), torch.zeros(flats[0].numel)
        sizes = [p.numel() for p in flats[0].parameters]
        pieces = pieces_by_rank([whole_leaves(sizes)], SIZE, 20)
        self.shards = []
        for rank, (flat, optimizer) in enumerate(zip(flats, self.optimizers, strict=True)):
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))
            self.shards.append(
                OptimizerShards(
                    optimizer,
                    flat.parameters,
                    self.memory,
                    self.gradients,
                    pieces,
                    rank=rank,
                    allocate=shared.allocator(),
                )
            )
            flat.move_to(self.memory)
        for shards in self.shards if is_confirmed else ():
            shards.confirm()

    def step(self, number: int, ranks: tuple[int, ...] = tuple(range(SIZE))) -> None:
        self.gradients.copy_(gradient(number, self.gradients.numel()))
        for shards in self.shards:
            shards.begin_update(number)
        for rank in ranks:
            self.shards[rank].update()


def gradient(number: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


def by_one(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[torch.Tensor, dict[str, Any]]:
    net = model()
    optimizer = make([{"params": net[0].parameters()}, {"params": [*net[1].parameters(), net.scale], "lr": 0.02}])  # type: ignore[index]
    flat = FlatParameters(list(net.parameters()))
    for number in range(1, steps + 1):
        for p, g in zip(flat.parameters, views_of(gradient(number, flat.numel), flat.parameters), strict=True):
            p.grad = g
        optimizer.step()
    return flat.read(), optimizer.state_dict()


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert actual["state"][number].keys() == state.keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(actual["state"][number][name], value)
            else:
                assert actual["state"][number][name] == value


@pytest.mark.parametrize("name", MAKERS)
def test_three_workers_do_what_one_does_and_their_state_is_the_same(name):
    workers = Workers(MAKERS[name])
    for number in (1, 2, 3):
        workers.step(number)
    expected, state = by_one(MAKERS[name], 3)
    torch.testing.assert_close(workers.memory, expected)
    for shards, optimizer in zip(workers.shards, workers.optimizers, strict=True):
        with shards.whole():
            assert_same_state(optimizer.state_dict(), state)
            counts = [
                state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), torch.Tensor)
            ]
            assert len({count.data_ptr() for count in counts}) == len(counts), "each parameter counts by itself"
    workers.step(4)
    torch.testing.assert_close(workers.memory, by_one(MAKERS[name], 4)[0])


@pytest.mark.parametrize("name", ["momentum", "adamw", "nadam"])
def test_workers_continue_from_the_state_of_a_checkpoint(name):
    first = Workers(MAKERS[name])
    first.step(1)
    for shards in first.shards:
        shards.leave()
    then = Workers(MAKERS[name], first.optimizers[1].state_dict())
    then.memory.copy_(first.memory)
    then.step(2)
    torch.testing.assert_close(then.memory, by_one(MAKERS[name], 2)[0])


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "fused"])
@pytest.mark.parametrize("chunks_done", [0, 1, 2])
@pytest.mark.parametrize("tears", [False, True])
def test_another_worker_completes_the_update_of_one_that_dies_in_it(monkeypatch, name, chunks_done, tears):
    monkeypatch.setattr(optimizer_shards, "_CHUNK_NUMBERS", 4)
    workers = Workers(MAKERS[name])
    workers.step(1)
    die_in_update(workers, 1, after=chunks_done, tears=tears)
    with pytest.raises(Died):
        workers.step(2, ranks=(0, 1))
    workers.shards[2].update()
    survivor = workers.shards[0]
    assert survivor.ranks_to_complete(2) == [1]
    for group in workers.optimizers[0].param_groups:
        group["lr"] = 123.0  # its schedule may have gone on
    survivor.complete(1)
    assert survivor.ranks_to_complete(2) == []
    expected, state = by_one(MAKERS[name], 2)
    torch.testing.assert_close(workers.memory, expected)
    workers.shards[2].leave()
    assert_same_state(workers.optimizers[2].state_dict(), state)


class Died(Exception):
    """Instead of a kill."""


def die_in_update(workers: Workers, rank: int, *, after: int, tears: bool) -> None:
    """Let a worker die after some chunks; with `tears`, when the next one is half written."""
    shards, step, calls = workers.shards[rank], workers.shards[rank]._step, iter(range(100))

    def die(optimizer: Any, parts: Any) -> None:
        if next(calls) == after:
            if tears:
                for part in parts:
                    part.parameter.data.fill_(float("nan"))
                    for table in shards._tables.values():
                        table[part.where] = float("nan")
            raise Died
        step(optimizer, parts)

    shards._step = die  # type: ignore[method-assign]


def test_a_worker_that_dies_before_the_step_counts_leaves_nothing_to_complete():
    workers = Workers(MAKERS["adamw"])
    workers.step(1)
    for shards in workers.shards:
        shards.begin_update(2)
    assert workers.shards[0].ranks_to_complete(1) == []


def test_if_the_beginning_is_interrupted_the_optimizer_has_what_it_had():
    before = Workers(MAKERS["adamw"])
    before.step(1)
    before.shards[0].leave()
    state = copy.deepcopy(before.optimizers[0].state_dict())
    again = Workers(MAKERS["adamw"], state, is_confirmed=False)
    for table in again.shards[1]._tables.values():
        table.fill_(float("nan"))  # worker 0 has not filled them
    again.shards[1].leave()
    assert_same_state(again.optimizers[1].state_dict(), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: LARS(p),
        lambda p: LAMB(p),
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.SparseAdam(p),
        lambda p: torch.optim.Adafactor(p),
    ],
)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(make):
    with pytest.raises(ConfigError) as caught:
        check_by_number(make(list(nn.Linear(3, 4).parameters())))
    assert caught.value.facts["reason"] == "optimizer"
    assert caught.value.facts["nearest"] == "replicated"


@pytest.mark.parametrize("name", MAKERS)
def test_checking_changes_nothing(name):
    net = nn.Linear(3, 4)
    optimizer = MAKERS[name](net.parameters())
    before = copy.deepcopy([*net.parameters()])
    check_by_number(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert not optimizer.state


def test_a_worker_that_owns_nothing_allocates_tables_of_the_parameters_type():
    shared = SharedAllocations()
    nets = [model().double() for _ in range(2)]
    flats = [FlatParameters(list(net.parameters())) for net in nets]
    memory, gradients = flats[0].read(), gradient(1, flats[0].numel).double()
    pieces = [*pieces_by_rank([whole_leaves([p.numel() for p in flats[0].parameters])], 1, 1000), []]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True) for net in nets]
    workers = [
        OptimizerShards(o, f.parameters, memory, gradients, pieces, rank=rank, allocate=shared.allocator())
        for rank, (o, f) in enumerate(zip(optimizers, flats, strict=True))
    ]
    for shards in workers:
        shards.confirm()
    for number in (1, 2):
        for shards in workers:
            shards.begin_update(number)
        for shards in reversed(workers):  # the one without pieces allocates first, and must know the type
            shards.update()
    for optimizer, shards in zip(optimizers, workers, strict=True):
        shards.leave()
        assert {slots["momentum_buffer"].dtype for slots in optimizer.state.values()} == {torch.float64}
