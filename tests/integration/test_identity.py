"""After a shrink a worker's rank is no longer its worker_id: every message, event and report names the worker_id."""

from __future__ import annotations

import pytest
import torch
from real_runs import SignalAt, my_rank, samples, small_net
from torch import nn

import syncline
from syncline.data.ledger import Used, decode
from syncline.observe.report.load import load
from syncline.telemetry.events import FatalFailure, Progress, Recovered, WarningMessage, WorkerFailure
from syncline.telemetry.run_dir import RunDir

KILLED_AT, NAN_AT = 5, 12
KILLED, FAULTY = 0, 2
"""Worker 0 is killed, so worker 2 has rank 1 when its loss becomes NaN."""


class NaNAt(nn.Module):
    """Makes the output of one worker NaN in a given call."""

    def __init__(self, net: nn.Module, worker_id: int, call: int) -> None:
        super().__init__()
        self.net, self.worker_id, self.call, self.calls = net, worker_id, call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.training:
            self.calls += 1
            if self.calls == self.call and my_rank() == self.worker_id:
                return out * float("nan")
        return out


def train(tmp_path, **changes):
    model = NaNAt(SignalAt(small_net(), [(KILLED_AT, KILLED)], tmp_path / "killed"), FAULTY, NAN_AT)
    return syncline.train(
        model=model, data=samples(), batch=10, epochs=3, workers=3, optimizer=syncline.sgd(lr=0.05), name="run",
        out=str(tmp_path), quiet=True, on_worker_failure="shrink", **changes,
    )  # fmt: skip


def events(tmp_path):
    return list(RunDir(tmp_path / "run").read_events())


def test_a_nan_after_a_shrink_is_reported_for_the_worker_that_had_it(tmp_path):
    with pytest.raises(syncline.NonFiniteLoss, match=f"worker {FAULTY}") as caught:
        train(tmp_path, on_nan="stop")
    assert caught.value.facts["worker_id"] == FAULTY
    assert f"worker {FAULTY - 1} " not in str(caught.value), "its rank at that time"
    (recovered,) = [e for e in events(tmp_path) if isinstance(e, Recovered)]
    assert recovered.members == [1, 2], "the run had shrunk before"
    (fatal,) = [e for e in events(tmp_path) if isinstance(e, FatalFailure)]
    assert fatal.worker_id == FAULTY
    assert f"worker {FAULTY}" in fatal.message
    (shown,) = load([tmp_path / "run"], is_live=lambda _: False)
    marks = [str(mark) for mark in shown.marks if "became nan" in str(mark)]
    assert marks
    assert all(f"worker {FAULTY} " in mark for mark in marks)


def test_a_skipped_nan_after_a_shrink_is_a_warning_that_names_the_worker(tmp_path):
    result = train(tmp_path, on_nan="skip")
    (warning,) = [e for e in events(tmp_path) if isinstance(e, WarningMessage) and "nan" in e.message]
    assert warning.worker_id == FAULTY
    assert f"worker {FAULTY}" in warning.message
    (failure,) = [e for e in events(tmp_path) if isinstance(e, WorkerFailure)]
    assert failure.worker_id == KILLED
    after = [e for e in events(tmp_path) if isinstance(e, Progress) and e.step > NAN_AT]
    assert {e.worker_id for e in after} == {1, 2}
    assert set(result.peak_memory_bytes) == {1, 2}
    ledger = [decode(line) for line in RunDir(tmp_path / "run").ledger.read_bytes().splitlines()]
    assert {line.worker for line in ledger if isinstance(line, Used) and line.view > 1} == {1, 2}
