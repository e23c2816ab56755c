"""Workers of a script that hold one model together: what it may do between steps, and what a death leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.errors import ConfigError, PeerFailed
from syncline.layouts.own_loop_shards import OwnLoopShards, check_loop
from syncline.strategies.exchange import Replica
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.reading import read_strategy
from syncline.testing.threads import run_on_threads, thread_collectives
from syncline.workers.update import PIGGYBACKED_COUNT

SIZE = 3


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def net() -> nn.Sequential:
    """A copy: threads that draw initial weights would mix up each other's random numbers."""
    return copy.deepcopy(NET)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Worker:
    """One worker's side of a script."""

    def __init__(self, collective: Collective) -> None:
        self.model = net()
        self.optimizer = adam(self.model)
        self.gradients = GradientBuffer(
            self.model.parameters(), collective, PIGGYBACKED_COUNT, is_flat=True, keeps_local=True
        )
        replica = Replica(self.model, self.optimizer, self.gradients, collective)
        self.exchange = OwnLoopShards(replica, read_strategy("allreduce").method)
        self.exchange.begin()

    def combine(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model).backward()
        self.gradients.attach()
        self.exchange.before_update(1 / SIZE)
        self.gradients.release_local(self.gradients.kinds)

    def step(self) -> None:
        self.combine()
        self.exchange.begin_update()
        self.exchange.update()
        self.exchange.end_update()


def loss_of(model: nn.Module) -> Any:
    return model(torch.arange(12.0).view(2, 6)).square().mean()


def by_one(steps: int) -> torch.Tensor:
    model = net()
    optimizer = adam(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return numbers(model)


def numbers(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_all_workers_hold_one_model_in_the_same_memory():
    def work(collective: Collective) -> tuple[list[int], torch.Tensor, int]:
        worker = Worker(collective)
        for _ in range(3):
            worker.step()
        addresses = [p.data_ptr() for p in worker.model.parameters()]
        return addresses, numbers(worker.model), worker.exchange.bytes_of_others()

    found = run_on_threads(SIZE, work)
    assert all(addresses == found[0][0] for addresses, _, _ in found)
    for _, vector, others in found:
        torch.testing.assert_close(vector, by_one(3))
        assert others > 4 * vector.numel()


def in_place(worker: Worker) -> None:
    with torch.no_grad():
        worker.model[0].bias.add_(0.0)


def by_data(worker: Worker) -> None:
    worker.model[1].weight.data.mul_(0.9)


def moved(worker: Worker) -> None:
    worker.model[1].weight.data = worker.model[1].weight.detach().clone()


def loaded(worker: Worker) -> None:
    worker.exchange.leave(worker.model)
    worker.model.load_state_dict(net().state_dict())


def state_loaded(worker: Worker) -> None:
    worker.optimizer.load_state_dict(copy.deepcopy(worker.optimizer.state_dict()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (in_place, "parameters-changed"),
        (by_data, "parameters-changed"),
        (moved, "parameters-changed"),
        (loaded, "parameters-loaded"),
        (state_loaded, "state-loaded"),
    ],
)
def test_what_a_script_changes_itself_is_refused_at_its_next_step(change: Callable[[Worker], None], reason: str):
    def work(collective: Collective) -> str:
        worker = Worker(collective)
        worker.step()
        collective.barrier()
        change(worker)
        with pytest.raises(ConfigError) as caught:
            worker.step()
        assert caught.value.facts["nearest"] == "replicated"
        return str(caught.value.facts["reason"])

    assert run_on_threads(SIZE, work) == [reason] * SIZE


def test_parameters_that_one_worker_loads_after_the_training_are_its_own():
    def work(collective: Collective) -> torch.Tensor:
        worker = Worker(collective)
        worker.step()
        collective.barrier()
        if collective.rank == 1:
            loaded(worker)
        collective.barrier()
        return numbers(worker.model)

    first, second, third = run_on_threads(SIZE, work)
    torch.testing.assert_close(second, numbers(net()))
    torch.testing.assert_close(first, by_one(1))
    assert torch.equal(first, third)


def test_a_graph_from_before_the_update_cannot_be_used_after_it_as_in_one_process():
    def work(collective: Collective) -> None:
        worker = Worker(collective)
        loss = loss_of(worker.model)
        worker.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_on_threads(SIZE, work)


def test_survivors_complete_the_update_of_a_worker_that_has_died_in_it():
    survivors = dict(zip((0, 2), thread_collectives(2), strict=True))

    def work(collective: Collective) -> torch.Tensor | None:
        worker = Worker(collective)
        worker.step()
        worker.combine()
        worker.exchange.begin_update()
        if collective.rank == 1:
            collective.abort()
            return None
        worker.exchange.update()
        with pytest.raises(PeerFailed):
            worker.exchange.end_update()
        assert not worker.exchange.is_complete
        worker.exchange.finish_updates(survivors[collective.rank])
        assert worker.exchange.is_complete
        return numbers(worker.model)

    first, _, third = run_on_threads(SIZE, work)
    torch.testing.assert_close(first, by_one(2))
    torch.testing.assert_close(third, by_one(2))


def test_a_worker_that_dies_before_the_update_counts_leaves_the_parameters_as_they_were():
    def work(collective: Collective) -> torch.Tensor | None:
        worker = Worker(collective)
        worker.step()
        worker.combine()
        if collective.rank == 1:
            collective.abort()
            return None
        with pytest.raises(PeerFailed):
            worker.exchange.begin_update()
        assert worker.exchange.is_complete
        return numbers(worker.model)

    first, _, third = run_on_threads(SIZE, work)
    torch.testing.assert_close(first, by_one(1))
    torch.testing.assert_close(third, by_one(1))


def test_optimizers_that_cannot_be_divided_are_refused():
    first, second, half = net(), net(), net()
    half[0].half()
    both = torch.optim.SGD([*first[0].parameters(), *second[0].parameters()], lr=0.1)
    check_loop([adam(first), adam(second)])
    for optimizers, reason in [([adam(first), both], "shared-parameters"), ([adam(half)], "dtypes")]:
        with pytest.raises(ConfigError) as caught:
            check_loop(optimizers)
        assert caught.value.facts["reason"] == reason


def test_sparse_gradients_are_refused_before_anything_is_changed():
    def work(collective: Collective) -> str:
        worker = Worker(collective)
        worker.combine()
        weight = worker.model[0].weight
        weight.grad = torch.ones_like(weight).to_sparse()
        with pytest.raises(ConfigError) as caught:
            worker.exchange.begin_update()
        assert torch.equal(numbers(worker.model), numbers(net()))
        return str(caught.value.facts["reason"])

    assert run_on_threads(SIZE, work) == ["sparse"] * SIZE
