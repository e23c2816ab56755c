"""Survivors without a driver save what they hold, each by itself and all at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from syncline.checkpoint import store
from syncline.checkpoint.schema import CheckpointState
from syncline.data.assignment import Position
from syncline.data.ledger import RecentLines, Used
from syncline.telemetry.recorder import Recorder
from syncline.telemetry.run_dir import RunDir
from syncline.workers.checkpoints import Checkpoints
from syncline.workers.train_state import Parts, TrainState

SURVIVORS = 6


def survivor(folder: Path, worker_id: int) -> tuple[Checkpoints, TrainState]:
    lines = RecentLines(f"session.{worker_id}.0")
    lines.add(Used(1, worker_id, 7, [(0, worker_id, worker_id + 1, 0, 1)]), 0.0)
    session = SimpleNamespace(
        run_dir=RunDir(folder),
        plan=SimpleNamespace(keep_checkpoints=3, run_id="run", data_fingerprint="data"),
        ledger_lines=lines,
        recorder=Recorder(worker_id),
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Checkpoints(cast(Any, session), None), TrainState(lambda: Parts(model, optimizer))


def exchange(worker_id: int) -> Any:
    """With a residual of its own, as `onebit` has."""
    return SimpleNamespace(private_state=lambda: {"own": worker_id}, replacement_state=lambda: {"own": None})


def test_survivors_that_save_at_once_leave_whole_checkpoints(tmp_path):
    workers = [survivor(tmp_path, worker_id) for worker_id in range(SURVIVORS)]
    begin = threading.Barrier(SURVIVORS)

    def save(worker_id: int) -> None:
        checkpoints, state = workers[worker_id]
        step = 8 if worker_id == 3 else 7  # one has come a step further
        begin.wait()
        checkpoints.save_alone(
            Position(0, step, step, 0), (), 100, state, exchange(worker_id), rank=worker_id, size=SURVIVORS
        )

    threads = [threading.Thread(target=save, args=(worker_id,)) for worker_id in range(SURVIVORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    found = store.checkpoints_in(tmp_path / "checkpoints")
    assert [c.step for c in found] == [7, 8]
    assert all(store.load(c) for c in found)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4, "nothing half-written is left"


def test_what_the_others_kept_for_themselves_is_replaced_as_for_failed_workers(tmp_path):
    checkpoints, state = survivor(tmp_path, 1)
    checkpoints.save_alone(Position(0, 5, 5, 0), ((0, 2, 3),), 100, state, exchange(1), rank=1, size=3)
    _, loaded, _ = store.newest_sound(tmp_path / "checkpoints")
    saved = CheckpointState.from_dict(loaded)
    assert saved.worker_states == [{"own": None}, {"own": 1}, {"own": None}]
    assert (saved.position.step, list(saved.requeued)) == (5, [(0, 2, 3)])
    assert (saved.run_id, saved.samples, saved.data_fingerprint) == ("run", 100, "data")
    assert torch.equal(saved.model["weight"], state.model.state_dict()["weight"])
