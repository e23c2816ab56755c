"""A checkpoint of any layout is the same state in any other, to the last bit, also after a shrink to three workers.

Each layout trains once with four workers, saves, loses one, and saves again with three. Each of these ten checkpoints
is loaded into each layout, by four and by three workers, and what all of them then hold is compared with the file.
The gate loads one of them; `SYNCLINE_TEST_LAYOUTS=all`, as in `make nightly`, all.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses, SharedMemoryRanks, start_fork_server, stop_fork_server
from real_runs import my_rank, samples
from torch import nn

import syncline
from syncline.checkpoint import store
from syncline.checkpoint.schema import TrainingState
from syncline.comms.collective import Collective
from syncline.layouts.chain.tracing import trace_chain
from syncline.layouts.layout import Layout, read_layout
from syncline.layouts.spread import ModelSpread
from syncline.layouts.stage_runner import StagedModel
from syncline.layouts.tensor_split import split_of
from syncline.strategies.exchange import Replica
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.reading import read_strategy
from syncline.telemetry.events import WorkerFailure
from syncline.telemetry.run_dir import RunDir
from syncline.workers.train_state import Parts, TrainState
from syncline.workers.update import PIGGYBACKED_COUNT

pytestmark = pytest.mark.xdist_group("any-checkpoint")  # one process, because these tests share fixtures

LAYOUTS = ["replicated", "sharded(2)", "pipeline(2)", "tensor(2)", "pipeline(2) x sharded(2)"]
BEFORE, AFTER = 4, 8
"""The steps that are saved: with four workers, and with three."""
ALL = [(layout, step) for layout in LAYOUTS for step in (BEFORE, AFTER)]
CHECKPOINTS = ALL if os.environ.get("SYNCLINE_TEST_LAYOUTS") == "all" else [("sharded(2)", AFTER)]


def net(seed: int = 0) -> nn.Module:
    """Large enough to be divided, of widths that do not divide evenly; batch norm in both stages."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 301, bias=False), nn.BatchNorm1d(301), nn.ReLU(), nn.Linear(301, 67), nn.BatchNorm1d(67),
        nn.ReLU(), nn.Linear(67, 3),
    )  # fmt: skip


class Dying(torch.optim.AdamW):
    """The worker of rank 3 is killed in its sixth update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.updates, self.own = 0, id(self)

    def step(self, closure: Any = None) -> Any:
        self.updates += self.own == id(self)  # a layout tries a copy of it first
        if self.updates == 6 and my_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoints of a run with this layout."""
    known: dict[str, Path] = {}

    def checkpoints(layout: str) -> Path:
        if layout not in known:
            result = syncline.train(
                model=net(), data=samples(), batch=10, epochs=9, max_steps=AFTER, workers=4, layout=layout, tune="off",
                optimizer=Dying, on_worker_failure="shrink", checkpoint_every_steps=BEFORE, checkpoint_every_s=1e6,
                quiet=True, out=str(tmp_path_factory.mktemp("run")),
            )  # fmt: skip
            events = RunDir(result.run_dir).read_events()
            assert [e.worker_id for e in events if isinstance(e, WorkerFailure)] == [3]
            known[layout] = RunDir(result.run_dir).checkpoints
        return known[layout]

    return checkpoints


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], SharedMemoryRanks]]:
    start_fork_server(__name__, "torch._dynamo")  # which optimizers import, for seconds
    opened = {size: RankProcesses(size) for size in (3, 4)}
    yield lambda size: SharedMemoryRanks(opened[size])
    for processes in opened.values():
        processes.close()
    stop_fork_server()


def spread_of(layout: Layout, model: nn.Module, collective: Collective) -> ModelSpread | None:
    grid = layout.grid(collective.size)
    if layout.is_replicated:
        return None
    spread = ModelSpread(grid, collective.rank)
    if grid.stages > 1:
        chain = trace_chain(model, (torch.randn(6, 12),))
        spread.staged = StagedModel(chain, (0, len(chain) // 2, len(chain)), "1f1b")
    if grid.slices > 1:
        spread.split = split_of(model, grid.slices)
        named = dict(model.named_parameters())
        spread.divided = frozenset(id(named[name]) for name in spread.split.divided)
    return spread


def what_workers_hold(folder: Path, step: int, text: str) -> Callable[[Collective], Any]:
    """Load the checkpoint as this layout; model and optimizer as each worker holds them, None on a spare one."""

    def work(collective: Collective) -> Any:
        def build() -> Parts:
            model = net(seed=collective.rank + 1)
            return Parts(model, torch.optim.AdamW(model.parameters(), lr=0.5))

        state, layout = TrainState(build), read_layout(text)
        loaded = store.at_step(folder, step)[1]
        state.load(TrainingState(**{name: loaded[name] for name in (f.name for f in fields(TrainingState))}))
        gradients = GradientBuffer(state.model.parameters(), collective, PIGGYBACKED_COUNT, is_flat=False)
        replica = Replica(state.model, state.optimizer, gradients, collective, step=step)
        spread = spread_of(layout, state.model, collective)
        exchange = layout.exchange(replica, read_strategy("allreduce").method, spread)
        exchange.begin()
        try:
            with exchange.shared():
                held = state.state()
                found = copy.deepcopy((dict(held.model), held.optimizer))
        finally:
            exchange.close()
        return found if spread is None or spread.cell is not None else None

    return work


def assert_same(found: Any, expected: Any) -> None:
    """The same structure with the same bits."""
    assert type(found) is type(expected) or isinstance(found, dict)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


@pytest.mark.parametrize(("source", "step"), CHECKPOINTS)
def test_every_layout_loads_the_same_bits(saved, ranks, source, step):
    folder = saved(source)
    expected = store.at_step(folder, step)[1]
    assert len(expected["optimizer"]["state"]) == len(list(net().parameters()))
    for target in LAYOUTS:
        for workers in (4, 3):
            held = [h for h in ranks(workers)(workers, what_workers_hold(folder, step, target)) if h is not None]
            assert len(held) == read_layout(target).grid(workers).workers
            for model, optimizer in held:
                assert_same(model, dict(expected["model"]))
                assert_same(optimizer, expected["optimizer"])
