"""Workers that are lost in the first step, when the optimizer's state is not shared yet: the run starts over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import final_state, my_rank, same_bits, samples
from torch import nn

import syncline
from syncline.data.audit import audit_file
from syncline.telemetry.events import WorkerFailure
from syncline.telemetry.run_dir import RunDir


class Dying(torch.optim.AdamW):
    """One worker is killed in its first update, which it leaves half written, a while after the others have made it.

    Then another one, when the layout tries this optimizer for the next View. Both by rank, once.
    """

    def __init__(self, params: Any, in_update: int, in_next_view: int, flags: Path) -> None:
        super().__init__(params, lr=0.01)
        self.in_update, self.in_next_view, self.flags, self.own = in_update, in_next_view, flags, id(self)

    def step(self, closure: Any = None) -> Any:
        first, second = self.flags / "first", self.flags / "second"
        is_trial = self.own != id(self)
        if my_rank() == self.in_update and not is_trial and not first.exists():
            first.touch()
            for p in self.param_groups[0]["params"]:
                p.data[: p.numel() // 2] = 7.0
            time.sleep(0.5)  # not for an event: the other replica cannot say when it has shared its optimizer's state
            os.kill(os.getpid(), signal.SIGKILL)
        if my_rank() == self.in_next_view and is_trial and first.exists() and not second.exists():
            second.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def net() -> nn.Module:
    """Batch norm in each stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16),
        nn.ReLU(), nn.Linear(16, 3),
    )  # fmt: skip


def train(folder: Path, in_update: int = -1, in_next_view: int = -1) -> syncline.Result:
    return syncline.train(
        model=net(), data=samples(), batch=10, epochs=1, quiet=True, out=str(folder), tune="off", workers=4,
        optimizer=lambda parameters: Dying(parameters, in_update, in_next_view, folder), layout="pipeline(2)",
        on_worker_failure="replace-only", max_failures=99,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return final_state(train(tmp_path_factory.mktemp("whole")).run_dir)["model"]


@pytest.mark.parametrize(
    ("in_update", "in_next_view"),
    [
        (1, -1),  # rank 0 continues, with a model that the user gave as an object, and that was trained
        (3, 2),  # of the survivors of the second failure, all had made the step that does not count any more
    ],
)
def test_a_run_that_starts_over_forgets_its_first_step(tmp_path, whole, in_update, in_next_view):
    killed = train(tmp_path, in_update, in_next_view)
    failures = [e for e in RunDir(killed.run_dir).read_events() if isinstance(e, WorkerFailure)]
    assert [e.worker_id for e in failures] == [rank for rank in (in_update, in_next_view) if rank >= 0]
    assert same_bits(whole, final_state(killed.run_dir)["model"])
    audit = audit_file(RunDir(killed.run_dir).ledger)
    assert audit.is_complete
    assert audit.is_clean
