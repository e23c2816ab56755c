"""Which process the killer chooses and when, and that it hits no other."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.lab.chaos import kills
from syncline.lab.chaos.kills import Killer, KillInterval, choose_victim, read_interval
from syncline.lab.chaos.processes import RunProcess, processes_of, send, zygote_of
from syncline.telemetry.events import Event, Progress, RunStarted, Summary, WorkerReady

numbers = st.integers(0, 9)


@given(st.sets(numbers), st.sets(numbers), st.integers(1, 8), st.integers(0, 3), st.integers())
def test_one_worker_with_the_trained_state_is_always_spared(alive, ready, workers, servers, seed):
    processes = [RunProcess(number, 100 + number) for number in sorted(alive)]
    range_of_servers = range(workers, workers + servers)
    pids = {100 + number for number in ready}
    found = choose_victim(processes, pids, servers=range_of_servers, rng=random.Random(seed))
    holders = {p.pid for p in processes if p.worker_id not in range_of_servers and p.pid in pids}
    if found is None:
        assert len(holders) <= 1
    elif found.worker_id not in range_of_servers:
        assert holders - {found.pid}


@given(st.sets(numbers, min_size=1), st.integers())
def test_every_process_may_be_killed_if_the_last_worker_may(alive, seed):
    processes = [RunProcess(number, 100 + number) for number in sorted(alive)]
    assert (
        choose_victim(processes, set(), servers=range(0), rng=random.Random(seed), kill_last_worker=True) in processes
    )


def test_every_process_is_chosen_at_times_and_the_same_seed_chooses_the_same():
    processes = [RunProcess(number, 100 + number) for number in range(4)]
    ready = {100, 101, 102}

    def choices(seed: int) -> list[RunProcess | None]:
        rng = random.Random(seed)
        return [choose_victim(processes, ready, servers=range(3, 4), rng=rng) for _ in range(100)]

    assert set(choices(7)) == set(processes)
    assert choices(7) == choices(7) != choices(8)


@pytest.mark.parametrize(
    ("text", "interval"),
    [("3s", KillInterval(seconds=3)), ("250ms", KillInterval(seconds=0.25)), ("200 steps", KillInterval(steps=200))],
)
def test_an_interval_is_a_time_or_a_number_of_steps(text, interval):
    assert read_interval(text) == interval
    assert read_interval(str(interval)) == interval


@pytest.mark.parametrize("text", ["3", "often", "0s", "0 steps", "-1s"])
def test_an_invalid_interval_is_rejected(text):
    with pytest.raises(ConfigError):
        read_interval(text)


# The thread


def started(run_dir: Path, workers: int = 2, servers: int = 0) -> list[Event]:
    ready: list[Event] = [
        WorkerReady(worker_id=n, pid=100 + n, parameters=1, collective="Solo") for n in range(workers)
    ]
    plan = {"workers": [{}] * workers, "servers": servers}
    return [RunStarted(run_dir=str(run_dir), plan=plan, machine={}), *ready]


def progress(step: int) -> Progress:
    return Progress(worker_id=0, epoch=0, step=step, samples=1, seconds=1.0, cursor=0)


@pytest.fixture
def world(monkeypatch):
    """Fake processes; returns the pids that were killed."""
    killed: list[int] = []
    monkeypatch.setattr(kills, "zygote_of", lambda _: 1)
    monkeypatch.setattr(
        kills, "processes_of", lambda *_: [RunProcess(n, 100 + n) for n in range(2) if 100 + n not in killed]
    )
    monkeypatch.setattr(kills, "send", lambda pid, *_, **__: killed.append(pid) or True)
    return killed


def test_no_process_is_killed_before_training_starts_nor_more_than_requested(tmp_path, world):
    killer = Killer(KillInterval(seconds=0.01), most=1, seed="a", kill_last_worker=True)
    try:
        for event in started(tmp_path):
            killer.on_event(event)
        assert not killer._thread.join(0.1)
        assert not world
        killer.on_event(progress(5))
        killer._thread.join(10)
    finally:
        killer.close()
    (kill,) = killer.kills
    assert [kill.pid] == world
    assert (kill.worker_id, kill.step) == (kill.pid - 100, 5)


def test_the_last_worker_is_spared(tmp_path, world):
    killer = Killer(KillInterval(seconds=0.01), most=2, seed="a")
    for event in [*started(tmp_path), progress(1)]:
        killer.on_event(event)
    while not killer.kills:
        threading.Event().wait(0.01)
    killer._thread.join(0.2)
    assert killer._thread.is_alive(), "it waits for a process that it may kill"
    killer.close()
    assert len(world) == 1


def test_kills_can_be_counted_in_steps(tmp_path, world):
    killer = Killer(KillInterval(steps=100), most=1, seed="a")
    for event in [*started(tmp_path), progress(1)]:
        killer.on_event(event)
    killer._thread.join(0.1)
    assert not killer.kills
    killer.on_event(progress(200))
    killer._thread.join(10)
    killer.close()
    assert len(killer.kills) == 1


def test_a_run_that_ended_or_is_being_stopped_is_left_alone(tmp_path, world):
    over = Killer(KillInterval(seconds=0.05), most=5, seed="a")
    stopped = Killer(KillInterval(seconds=0.05), most=5, seed="a", may_kill=lambda: False)
    summary = Summary(metrics={}, samples_per_s=1, seconds=1, steps=1, epochs=1, workers=2, run_dir="")
    for event in [*started(tmp_path), progress(1)]:
        over.on_event(event)
        stopped.on_event(event)
    over.on_event(summary)
    over._thread.join(10)
    stopped._thread.join(10)
    over.close()
    stopped.close()
    assert not world


# Processes

ZYGOTE = """
import os, subprocess, sys  # syncline.engines.zygote
children = []
for name in ("worker-0.log", "worker-12.log", "other.txt"):
    with open(os.path.join(sys.argv[1], name), "w") as log:
        children.append(subprocess.Popen(["sleep", "60"], stdout=log))
print("ready", flush=True)
sys.stdin.read()
for child in children:
    child.kill()
"""


@pytest.fixture
def family(tmp_path):
    (tmp_path / "logs").mkdir()
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, str(tmp_path / "logs")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert zygote.stdout is not None
    assert zygote.stdout.readline() == "ready\n"
    yield zygote
    zygote.communicate("", timeout=10)


def test_the_processes_of_a_run_are_found_by_their_parent_and_their_logs(tmp_path, family):
    assert zygote_of(os.getpid()) == family.pid
    found = processes_of(tmp_path, family.pid)
    assert [process.worker_id for process in found] == [0, 12]
    assert processes_of(tmp_path / "another", family.pid) == []


def test_a_signal_reaches_a_live_child_only(tmp_path, family):
    first, second = processes_of(tmp_path, family.pid)
    assert not send(first.pid, signal.SIGKILL, parent=os.getpid()), "it is not this process's child"
    assert send(first.pid, signal.SIGKILL, parent=family.pid)
    while first in processes_of(tmp_path, family.pid):
        threading.Event().wait(0.01)
    assert not send(first.pid, signal.SIGKILL, parent=family.pid), "it is a zombie"
    assert processes_of(tmp_path, family.pid) == [second]
    assert not send(2**22 + 1, signal.SIGKILL, parent=family.pid), "no process has such a number"
