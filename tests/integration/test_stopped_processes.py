"""Each kind of process that a run starts is stopped (SIGSTOP): it is noticed within seconds, and the run completes.

Also a zygote that is killed. Not here: stopped node agents of Ray and Spark (`test_ray.py`, `test_spark.py`).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from real_runs import Slow, parent, samples, small_net, stop, worker_process
from torch.utils.data import Dataset

import syncline
from syncline.compute.processes import process_state
from syncline.data.audit import audit_file
from syncline.engines.zygote_process import Key, ZygoteProcess
from syncline.telemetry.events import CheckpointSaved, Event, Recovered, WarningMessage, WorkerFailure, WorkerReady
from syncline.telemetry.run_dir import RunDir

LIMIT_S = 40.0
NOTICED_S = 3.0
Found = TypeVar("Found")


class Items(Dataset[Any]):
    """Samples that loader processes read."""

    def __init__(self) -> None:
        self.inputs, self.targets = samples()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class LiveRun:
    """A run in a thread, which ends soon after `enough`."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self._enough = folder / "runs" / "run", folder / "enough"
        self._done: list[syncline.Result] = []
        self._settings: dict[str, Any] = {
            "model": Slow(small_net(), 0.05, until=self._enough), "data": samples(), "batch": 10, "epochs": 60,
            "workers": 3, "optimizer": syncline.sgd(lr=0.05), "out": str(folder / "runs"), "name": "run",
            "quiet": True, **settings,
        }  # fmt: skip
        self._thread = threading.Thread(target=lambda: self._done.append(syncline.train(**self._settings)))
        self._thread.start()

    def events(self, kind: type[Event]) -> list[Any]:
        run_dir = RunDir(self.folder)
        return [e for e in run_dir.read_events() if isinstance(e, kind)] if run_dir.events.exists() else []

    def process(self, worker_id: int) -> int:
        return worker_process(self.folder, worker_id)

    def ready(self) -> None:
        until(lambda: len({e.worker_id for e in self.events(WorkerReady)}) == self._settings["workers"])

    def finish(self) -> syncline.Result:
        self._enough.touch()
        self._thread.join(LIMIT_S)
        (result,) = self._done
        return result


@contextmanager
def live(folder: Path, **settings: object) -> Iterator[LiveRun]:
    """A live run whose workers train; checked at the end: every sample was used once."""
    run = LiveRun(folder, **settings)
    try:
        run.ready()
        yield run
    finally:
        result = run.finish()
    audit = audit_file(RunDir(result.run_dir).ledger)
    assert audit.is_clean, audit
    assert audit.is_complete


def until(what: Callable[[], Found], limit_s: float = LIMIT_S) -> Found:
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        threading.Event().wait(0.02)
    return found


def children(pid: int) -> list[int]:
    lists = [tasks.read_text() for tasks in Path("/proc", str(pid), "task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]


def recoveries(run: LiveRun, *, members: int) -> int:
    """How often as many workers have continued."""
    return len([e for e in run.events(Recovered) if len(e.members) == members])


def test_a_stopped_zygote_is_noticed_and_replaced_also_if_a_worker_is_killed_at_that_moment(tmp_path):
    with live(tmp_path) as run:
        first = parent(run.process(1))
        since = stop(first)
        (warning,) = until(lambda: run.events(WarningMessage))
        assert "stopped" in warning.message
        assert warning.time - since < NOTICED_S
        assert not run.events(WorkerFailure), "its workers continue"

        os.kill(run.process(1), signal.SIGKILL)
        until(lambda: recoveries(run, members=3) == 1)
        second = parent(run.process(1))
        assert second != first
        since = stop(second)
        os.kill(run.process(1), signal.SIGKILL)
        failure = until(lambda: run.events(WorkerFailure)[1:])[0]
        assert "SIGKILL" in failure.cause, "how it ended is known although the zygote cannot report it"
        warning = until(lambda: run.events(WarningMessage)[1:])[0]
        assert max(failure.time, warning.time) - since < NOTICED_S
        until(lambda: recoveries(run, members=3) == 2)
    assert [process_state(zygote) in ("", "Z") for zygote in (first, second)] == [True, True]


def test_a_killed_zygote_is_replaced_with_its_workers_and_the_run_continues(tmp_path):
    with live(tmp_path, workers=2, checkpoint_every_steps=5) as run:
        until(lambda: run.events(CheckpointSaved))
        first = parent(run.process(1))
        os.kill(first, signal.SIGKILL)
        since = time.time()
        (warning,) = until(lambda: run.events(WarningMessage))
        assert "SIGKILL" in warning.message
        failures = until(lambda: run.events(WorkerFailure)[1:] and run.events(WorkerFailure))
        assert {failure.worker_id for failure in failures} == {0, 1}
        assert max(e.time for e in (warning, *failures)) - since < NOTICED_S
        until(lambda: recoveries(run, members=2))
        assert parent(run.process(1)) != first
    assert process_state(first) in ("", "Z")


def test_a_worker_that_is_stopped_before_its_first_heartbeat_is_noticed_and_replaced(tmp_path, monkeypatch):
    since: list[float] = []
    add_worker = ZygoteProcess._add_worker

    def add_and_stop(self: ZygoteProcess, key: Key, pid: int, descriptor: int) -> None:
        add_worker(self, key, pid, descriptor)
        if key == (1, 0):
            since.append(stop(pid))

    monkeypatch.setattr(ZygoteProcess, "_add_worker", add_and_stop)
    with live(tmp_path) as run:
        (failure,) = run.events(WorkerFailure)
        assert (failure.worker_id, "SIGSTOP" in failure.cause) == (1, True)
        assert failure.time - since[0] < NOTICED_S


def test_a_stopped_server_is_noticed_and_replaced_also_if_a_worker_is_killed_at_that_moment(tmp_path):
    with live(tmp_path, strategy="ssp", workers=2, checkpoint_every_steps=10) as run:
        since = stop(run.process(2))
        (failure,) = until(lambda: run.events(WorkerFailure))
        assert (failure.name, "stopped" in failure.cause) == ("server 0", True)
        assert failure.time - since < NOTICED_S
        until(lambda: recoveries(run, members=2))

        stop(run.process(2))
        os.kill(run.process(1), signal.SIGKILL)
        until(lambda: [e.name for e in run.events(WorkerFailure)].count("server 0") == 2)


def test_a_stopped_loader_process_is_noticed_and_continued_also_if_a_worker_is_killed_at_that_moment(tmp_path):
    with live(tmp_path, data=Items(), loaders=1, workers=2) as run:
        (loader,) = until(lambda: children(run.process(0)))
        since = stop(loader)
        (warning,) = until(lambda: run.events(WarningMessage))
        assert (warning.worker_id, str(loader) in warning.message) == (0, True)
        assert warning.time - since < NOTICED_S
        assert not run.events(WorkerFailure)

        stop(loader)
        os.kill(run.process(1), signal.SIGKILL)
        until(lambda: recoveries(run, members=2))
    for left in Path(tempfile.gettempdir()).glob("pymp-*"):
        shutil.rmtree(left)  # sockets of multiprocessing, which a killed process leaves
