"""The optimizer of a script, divided among workers, does what it does alone; one that dies is completed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from shared_allocations import SharedAllocations
from torch import nn

from syncline.errors import ConfigError
from syncline.layouts import loop_optimizer
from syncline.layouts.loop_optimizer import LoopOptimizer, OptimizerOffer, check_optimizer
from syncline.strategies.flat import FlatParameters

SIZE = 3
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
}
SKIPPED = [(), (0, 3), (0,), (), (4,)]
"""Of each step: the parameters that have no gradient in it."""


def parts() -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    parameters = [*net.parameters(), nn.Parameter(torch.tensor(2.0))]
    return parameters, [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}]


def set_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, p in enumerate(parameters):
        gradient = torch.randn(p.shape, generator=generator)
        p.grad = None if number in SKIPPED[step] else gradient


class Workers:
    """Some workers in one process, whose allocations are shared in the order of the calls."""

    def __init__(self, make: Make, state: dict[str, Any] | None = None) -> None:
        self.parameters: list[list[nn.Parameter]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.divided: list[LoopOptimizer] = []
        shared = SharedAllocations()
        for rank in range(SIZE):
            parameters, groups = parts()
            flat, optimizer = FlatParameters(parameters), make(groups)
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))
            self.memory = flat.read() if rank == 0 else self.memory
            divided = LoopOptimizer(
                optimizer,
                parameters,
                self.memory,
                rank=rank,
                size=SIZE,
                offers=[OptimizerOffer.of(optimizer, parameters)],
                allocate=shared.allocator(),
            )
            flat.move_to(self.memory)
            self.parameters.append(parameters)
            self.optimizers.append(optimizer)
            self.divided.append(divided)
        for divided in self.divided:
            divided.confirm()

    def step(self, number: int, ranks: Sequence[int] = range(SIZE)) -> None:
        for parameters, divided in zip(self.parameters, self.divided, strict=True):
            set_gradients(parameters, number)
            divided.begin_update()
        for rank in ranks:
            self.divided[rank].update()


def by_one(make: Make, steps: int) -> tuple[torch.Tensor, dict[str, Any]]:
    parameters, groups = parts()
    optimizer = make(groups)
    for number in range(steps):
        set_gradients(parameters, number)
        optimizer.step()
    return FlatParameters(parameters).read(), optimizer.state_dict()


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert actual["state"][number].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(actual["state"][number][name], value)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(loop_optimizer, "_CHUNK_NUMBERS", 4)


@pytest.mark.parametrize("name", MAKERS)
def test_workers_do_what_one_does_though_some_steps_leave_parameters_out(name):
    workers = Workers(MAKERS[name])
    for steps in range(1, len(SKIPPED) + 1):
        workers.step(steps - 1)
        expected, state = by_one(MAKERS[name], steps)
        torch.testing.assert_close(workers.memory, expected)
        for optimizer in workers.optimizers:
            assert_same_state(optimizer.state_dict(), state)
    counts = [s["step"].data_ptr() for s in workers.optimizers[0].state.values() if "step" in s]
    assert len(set(counts)) == len(counts), "each parameter counts by itself"


@pytest.mark.parametrize("name", ["momentum", "adamw", "nadam"])
def test_workers_continue_from_a_state_in_which_parameters_have_counted_different_steps(name):
    first = Workers(MAKERS[name])
    for number in (0, 1, 2):
        first.step(number)
    then = Workers(MAKERS[name], first.optimizers[1].state_dict())
    then.memory.copy_(first.memory)
    then.step(3)
    expected, state = by_one(MAKERS[name], 4)
    torch.testing.assert_close(then.memory, expected)
    assert_same_state(then.optimizers[2].state_dict(), state)


class Died(Exception):
    """Instead of a kill."""


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "rprop"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("chunks_done", [0, 1, 2])
@pytest.mark.parametrize("tears", [False, True])
def test_another_worker_completes_the_update_of_one_that_dies_in_it(name, first, chunks_done, tears):
    workers = Workers(MAKERS[name])
    for number in range(first):
        workers.step(number)
    dying, calls = workers.divided[1], iter(range(100))
    step = dying._step

    def die(chunk: Any) -> None:
        if next(calls) == chunks_done:
            for part in chunk if tears else ():
                for tensor in (part.parameter.data, *part.tables.values()):
                    tensor.fill_(float("nan"))
            raise Died
        step(chunk)

    dying._step = die  # type: ignore[method-assign]
    with pytest.raises(Died):
        workers.step(first, ranks=(0, 1))
    workers.divided[2].update()
    workers.divided[2].complete_others()
    expected, state = by_one(MAKERS[name], first + 1)
    torch.testing.assert_close(workers.memory, expected)
    for rank in (0, 2):
        assert_same_state(workers.optimizers[rank].state_dict(), state)


class CountsInGroup(torch.optim.SGD):
    """Counts steps in the group, and uses the count: parts that are updated one after another would each count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


class OfAll(torch.optim.SGD):
    """Divides by the norm of all gradients: workers would each divide by that of their part."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        torch._foreach_div_(gradients, torch.nn.utils.get_total_norm(gradients))
        return super().step(closure)


@pytest.mark.parametrize("make", [CountsInGroup, OfAll])
def test_an_optimizer_that_would_notice_the_division_is_refused(make):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(make(list(nn.Linear(3, 4).parameters()), lr=0.1))
    assert caught.value.facts["reason"] == "optimizer"


def test_hooks_on_the_step_are_refused():
    optimizer = MAKERS["sgd"](list(nn.Linear(3, 4).parameters()))
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        check_optimizer(optimizer)
    assert caught.value.facts["reason"] == "step-hooks"


def test_a_state_that_the_script_replaces_is_noticed():
    workers = Workers(MAKERS["adamw"])
    workers.step(0)
    assert all(divided.is_intact for divided in workers.divided)
    optimizer = workers.optimizers[1]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [divided.is_intact for divided in workers.divided] == [True, False, True]
