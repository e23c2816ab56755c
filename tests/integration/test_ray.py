"""Runs on a real Ray cluster: the same result as on one machine, and the same promises when actors and nodes die.

The cluster is started here and ended here, and listens on loopback only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from real_runs import (
    ACROSS_HOSTS,
    Slow,
    driver_pid,
    environment,
    final_state,
    my_rank,
    parent,
    relative_difference,
    samples,
    small_net,
    stop,
    worker_process,
)
from real_runs import syncline as command
from serving_models import assert_scored, scorable
from torch import nn

import syncline
from syncline.compute.processes import process_state
from syncline.config.run import RunConfig
from syncline.data.audit import audit_file
from syncline.driver import run_task
from syncline.errors import DataError, SynclineError
from syncline.task import Task
from syncline.telemetry.events import CheckpointSaved, Event, InfoMessage, Recovered, StrategySwitched, WorkerFailure
from syncline.telemetry.run_dir import RunDir

pytest.importorskip("ray")

pytestmark = pytest.mark.xdist_group("ray")  # one process, because these tests share a fixture

LIMIT_S = 90.0
NOTICED_S = 3.0
ACROSS = {"collective": "process-group"}
"""As between hosts. These nodes are on one, where workers would share memory."""

CLUSTER = """
import json, os, sys
if os.fork():
    os._exit(0)  # an orphan, because Ray starts and ends processes when it likes, and tests count theirs
from ray.cluster_utils import Cluster

node = {
    "node_ip_address": "127.0.0.1", "include_dashboard": False, "include_log_monitor": False, "no_monitor": True,
    "object_store_memory": 80 * 2**20,
}
cluster = Cluster()
for line in sys.stdin:  # one node for each line, until it is closed
    added = cluster.add_node(num_cpus=int(line), **node)
    raylet = added.all_processes["raylet"][0].process.pid
    print(json.dumps({"address": cluster.address, "raylet": raylet}), file=sys.stderr, flush=True)
cluster.shutdown()
"""
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # On Linux Ray replaces a loopback address, unless it believes to be on a Mac.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A dead node is noticed after two seconds, instead of half a minute.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster:
    """A Ray cluster in processes of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.log = Path(folder, "cluster.log")
        reading, writing = os.pipe()
        with self.log.open("w") as log, open(writing, "w") as output:
            self._answers = open(reading)  # noqa: SIM115  # closed in `close`
            starter = subprocess.Popen(
                [sys.executable, "-c", CLUSTER],
                env=environment({**RAY, "RAY_TMPDIR": folder, "TMPDIR": folder}),
                stdin=subprocess.PIPE, stdout=log, stderr=output, text=True,
            )  # fmt: skip
        assert starter.stdin is not None
        self._orders = starter.stdin
        starter.wait(LIMIT_S)
        self.address = ""

    def add_node(self, cpus: int) -> int:
        """The process of the new node's raylet."""
        self._orders.write(f"{cpus}\n")
        self._orders.flush()
        for line in self._answers:
            with contextlib.suppress(json.JSONDecodeError):
                answer = json.loads(line)
                self.address = answer["address"]
                return int(answer["raylet"])
        raise AssertionError("the cluster has ended")

    def close(self) -> None:
        """End all of it, and see that nothing is left."""
        self._orders.close()
        try:
            until(lambda: not processes_with(self.folder), f"{processes_with(self.folder)} end")
        finally:
            for pid in processes_with(self.folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._answers.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node with room for two workers."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in RAY.items():
            patch.setenv(name, value)
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # the same, if Ray is loaded already
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = Cluster(folder)
        try:
            cluster.add_node(2)
            yield cluster
        finally:
            cluster.close()


@contextlib.contextmanager
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths must be short."""
    folder = tempfile.mkdtemp(prefix="slray-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def processes_with(folder: str) -> list[int]:
    """All processes whose working directory is in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"RAY_TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        threading.Event().wait(0.02)


class RecordedEvents:
    """A view that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def train(folder: Path, model: Any, view: RecordedEvents | None = None, **settings: Any) -> syncline.Result:
    task = Task(
        model=model, data=samples(), test=samples(57, seed=2), loss="cross_entropy",
        optimizer=syncline.sgd(lr=0.05, momentum=0.9),
    )  # fmt: skip
    config = RunConfig(**{"workers": 2, "batch": 10, "epochs": 3, "out": str(folder), "tune": "off", **settings})
    return run_task(task, config, view or RecordedEvents())


def events(run_dir: Path, kind: type[Event]) -> list[Any]:
    return [e for e in RunDir(run_dir).read_events() if isinstance(e, kind)]


def assert_every_sample_counted_once(run_dir: Path) -> None:
    audit = audit_file(RunDir(run_dir).ledger)
    assert audit.is_clean, audit
    assert audit.is_complete
    assert all(e.samples == e.committed for e in audit.epochs)


class Placed(nn.Module):
    """Writes down where each worker is, and kills the process that keeps a place, at a given call of forward, once.

    The one of rank 1, after it has created the file `reached` to show that it came to that call.
    """

    def __init__(self, net: nn.Module, folder: Path, *, call: int, kills: bool) -> None:
        super().__init__()
        self.net, self.folder, self.call, self.kills = net, folder, call, kills
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 1:
                with (self.folder / f"places-{my_rank()}").open("a") as file:
                    file.write(f"{driver_pid()} {os.environ['RAY_RAYLET_PID']}\n")
            reached = self.folder / "reached"
            if self.calls == self.call and my_rank() == 1 and not reached.exists():
                reached.touch()
                if self.kills:
                    os.kill(driver_pid(), signal.SIGKILL)
        out: torch.Tensor = self.net(x)
        return out


def places(folder: Path, rank: int) -> list[tuple[int, int]]:
    """For each life of a worker, the processes of its actor and of its node's raylet."""
    lines = (folder / f"places-{rank}").read_text().splitlines()
    return [(int(actor), int(raylet)) for actor, raylet in map(str.split, lines)]


def so_far(run_dir: Path, kind: type[Event]) -> list[Any]:
    """The events of a run that may not have begun."""
    return events(run_dir, kind) if (run_dir / "events.jsonl").exists() else []


def is_back(run_dir: Path, rank: int) -> bool:
    """Whether a worker was lost, and is with the others again."""
    lost = [e.time for e in so_far(run_dir, WorkerFailure) if e.worker_id == rank]
    return bool(lost) and any(rank in e.members and e.time > lost[-1] for e in so_far(run_dir, Recovered))


# The same result


def test_a_run_on_ray_trains_the_same_parameters_as_on_this_machine(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    view = RecordedEvents()
    there = train(tmp_path / "there", small_net(), view, engine="ray")
    here = train(tmp_path / "here", small_net(), engine="local")
    states = [final_state(result.run_dir)["model"] for result in (here, there)]
    assert relative_difference(*states) < 1e-5
    assert_every_sample_counted_once(there.run_dir)
    first = next(e.message for e in view.events if isinstance(e, InfoMessage))
    assert re.search("Ray.* 2 of 2 workers", first)


def test_workers_on_one_node_of_ray_hold_a_model_together(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    there = train(tmp_path / "there", small_net(), engine="ray", layout="pipeline(2)")
    here = train(tmp_path / "here", small_net(), engine="local", workers=1)
    assert relative_difference(*(final_state(result.run_dir)["model"] for result in (here, there))) < 1e-5
    assert_every_sample_counted_once(there.run_dir)


@pytest.mark.parametrize(("strategy", "epochs"), ACROSS_HOSTS.items(), ids=("rivals", "the others"))
def test_presets_that_make_sense_across_hosts_run_on_ray(cluster, tmp_path, strategy, epochs):
    engine = f"ray://{cluster.address}"
    result = train(tmp_path, small_net(), engine=engine, strategy=strategy, epochs=epochs, **ACROSS)
    assert result.epochs == epochs
    assert len(events(result.run_dir, StrategySwitched)) == strategy.count(", then ")
    assert result.metrics["test/accuracy"] > 0.6
    assert_every_sample_counted_once(result.run_dir)


def test_h2o_runs_on_ray_with_two_groups_of_workers(cluster, tmp_path):
    result = train(tmp_path, small_net(), engine=f"ray://{cluster.address}?cpus=0.5", strategy="h2o", workers=4)
    assert result.metrics["test/accuracy"] > 0.6
    assert_every_sample_counted_once(result.run_dir)


# Deaths


def test_when_an_actor_is_killed_the_run_continues_and_a_replacement_joins(cluster, tmp_path):
    back = tmp_path / "back"
    model = Placed(Slow(small_net(), 0.1, until=back), tmp_path, call=7, kills=True)
    with touched_when(back, lambda: is_back(tmp_path / "killed-actor", 1)):
        result = train(tmp_path, model, engine=f"ray://{cluster.address}", epochs=100, name="killed-actor")
    (lost,) = events(result.run_dir, WorkerFailure)
    assert lost.worker_id == 1
    assert "was lost with its" in lost.cause
    (first, _), (second, _) = places(tmp_path, 1)
    ((other, _),) = places(tmp_path, 0)
    assert len({first, second, other}) == 3, "not in the other's place, but in a new actor"
    assert [e.members for e in events(result.run_dir, Recovered)][-1] == [0, 1]
    assert_every_sample_counted_once(result.run_dir)


def test_a_stopped_actor_is_noticed_and_replaced_also_if_a_worker_is_killed_at_that_moment(cluster, tmp_path):
    enough, run_dir, done = tmp_path / "enough", tmp_path / "stopped-actor", list[syncline.Result]()
    settings = {"engine": f"ray://{cluster.address}", "epochs": 60, "name": run_dir.name, "checkpoint_every_steps": 5}
    thread = threading.Thread(
        target=lambda: done.append(train(tmp_path, Slow(small_net(), 0.05, until=enough), **settings))
    )
    thread.start()
    try:
        until(lambda: so_far(run_dir, CheckpointSaved), "the first checkpoint")
        first = parent(parent(worker_process(run_dir, 1)))
        since = stop(first)
        until(lambda: so_far(run_dir, WorkerFailure), "noticing")
        (lost,) = so_far(run_dir, WorkerFailure)
        assert (lost.worker_id, "no heartbeat" in lost.cause) == (1, True)
        assert lost.time - since < NOTICED_S
        until(lambda: is_back(run_dir, 1), "the return of worker 1")

        second = parent(parent(worker_process(run_dir, 1)))
        since = stop(second)
        os.kill(worker_process(run_dir, 0), signal.SIGKILL)
        until(lambda: len(so_far(run_dir, WorkerFailure)) == 3, "noticing both")
        both = so_far(run_dir, WorkerFailure)[1:]
        assert sorted(e.worker_id for e in both) == [0, 1]
        assert max(e.time for e in both) - since < NOTICED_S
        until(lambda: is_back(run_dir, 0) and is_back(run_dir, 1), "the return of both workers")
    finally:
        enough.touch()
        thread.join(LIMIT_S)
    assert_every_sample_counted_once(done[0].run_dir)
    assert [process_state(actor) in ("", "Z") for actor in (first, second)] == [True, True]


def test_when_a_node_is_killed_the_run_continues_on_other_nodes(cluster, tmp_path):
    raylet = cluster.add_node(1)
    back = tmp_path / "back"
    model = Placed(Slow(small_net(), 0.1, until=back), tmp_path, call=7, kills=False)

    def kill_the_node() -> None:
        until((tmp_path / "reached").exists, "the run is in the middle of its first epoch")
        for pid in [raylet, *descendants(raylet)]:
            with contextlib.suppress(ProcessLookupError):  # with the raylet its processes begin to end by themselves
                os.kill(pid, signal.SIGKILL)

    run_dir = tmp_path / "killed-node"
    killer = threading.Thread(target=kill_the_node)
    killer.start()
    with touched_when(back, lambda: any(is_back(run_dir, rank) for rank in (0, 1))):
        result = train(tmp_path, model, engine=f"ray://{cluster.address}?spread", epochs=100, name=run_dir.name)
    killer.join()
    (lost,) = events(result.run_dir, WorkerFailure)
    (first, there), (second, elsewhere) = places(tmp_path, lost.worker_id)
    ((other, head),) = places(tmp_path, 1 - lost.worker_id)
    assert there == raylet
    assert elsewhere == head
    assert len({first, second, other}) == 3, "not in the other's place, but in a new actor"
    assert [e.members for e in events(result.run_dir, Recovered)][-1] == [0, 1]
    assert_every_sample_counted_once(result.run_dir)


@contextlib.contextmanager
def touched_when(path: Path, condition: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile, make the file as soon as something is so; or when it is too late, so that a slow run ends."""
    is_over = threading.Event()

    def look() -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition() and not is_over.is_set() and time.monotonic() < deadline:
            is_over.wait(0.1)
        path.touch()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def descendants(pid: int) -> list[int]:
    """The processes that this one has started, directly or not."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    frontier = {pid}
    while frontier := {child for child, parent in parents.items() if parent in frontier}:
        found += frontier
    return found


# Room, and the end


def test_too_few_cpus_are_reported_with_what_was_requested_and_what_there_is(cluster, tmp_path):
    with pytest.raises(SynclineError, match=r"no room for 3 workers.* 3 workers with 2 CPUs each\. .* has 2 CPUs"):
        train(tmp_path, small_net(), engine=f"ray://{cluster.address}?cpus=2&wait=2", workers=3)


def test_ctrl_c_while_there_is_no_room_ends_at_once(cluster, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", "train", "mlp", "--data", "digits",
         "--engine", f"ray://{cluster.address}?cpus=64"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as waiting:  # fmt: skip
        assert waiting.stdout is not None
        line = waiting.stdout.readline()
        assert re.search("2 of 2 workers.* 2 workers with 64 CPUs each", line), line
        waiting.send_signal(signal.SIGINT)
        rest, _ = waiting.communicate(timeout=LIMIT_S)
    assert waiting.returncode == 130, rest
    assert "Traceback" not in rest


def test_without_a_cluster_one_is_started_and_nothing_is_left_of_it(tmp_path):
    with short_folder() as folder:
        done = command(
            "train", "mlp", "--data", "digits", "--workers", "3", "--epochs", "1", "--engine", "ray",
            cwd=tmp_path, env={"RAY_TMPDIR": folder, "TMPDIR": folder, "RAY_ADDRESS": "local"},
        )  # fmt: skip
        assert done.code == 0, done.out + done.err
        until(lambda: not processes_with(folder), f"{processes_with(folder)} end")
        assert list(Path(folder).iterdir()) == []
    shown = done.out + done.err
    assert "mlp on digits, 3 workers, allreduce" in shown, "as many as asked for, like on the local engine"
    assert "ray::" not in shown
    assert "INFO" not in shown
    assert "WARNING" not in shown


def test_files_are_scored_on_ray_each_row_once_though_an_actor_is_killed(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model, rows = scorable(tmp_path)
    killed: list[int] = []

    def kill_one(done: int, _: int) -> None:
        if not killed:
            killed.append(next(p for p in processes_with(cluster.folder) if command_of(p).startswith("ray::_Scoring")))
            os.kill(killed[0], signal.SIGKILL)

    done = syncline.score(model, rows, tmp_path / "out", engine="ray", on_progress=kill_one)
    assert killed
    assert (done.rows, done.scored_rows, done.runtime, done.engine) == (1200, 1200, "onnx", "ray")
    assert_scored(pq.read_table(done.path), 1200)
    (tmp_path / "out" / "part-00001-00003-0000000000.parquet").unlink()
    again = syncline.score(model, rows, tmp_path / "out", engine="ray")
    assert again.scored_rows == 100
    assert_scored(pq.read_table(done.path), 1200)
    (tmp_path / "bad.csv").write_text("id,a,b\n1,1,2\n2,,3\n")
    with pytest.raises(DataError, match="line 3"):
        syncline.score(model, tmp_path / "bad.csv", tmp_path / "bad", engine="ray")


def command_of(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
