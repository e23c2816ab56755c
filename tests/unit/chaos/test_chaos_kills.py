"""Whom the killer chooses and when, and that it finds and hits nobody else."""

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

from syncline.chaos import kills
from syncline.chaos.kills import Killer, Rhythm, choose, read_rhythm
from syncline.chaos.processes import Process, processes_of, send, zygote_of
from syncline.errors import ConfigError
from syncline.telemetry.events import Event, Progress, RunStarted, Summary, WorkerReady

numbers = st.integers(0, 9)


@given(st.sets(numbers), st.sets(numbers), st.integers(1, 8), st.integers(0, 3), st.integers())
def test_a_worker_that_holds_what_was_trained_is_always_left(alive, ready, workers, servers, seed):
    processes = [Process(number, 100 + number) for number in sorted(alive)]
    range_of_servers = range(workers, workers + servers)
    pids = {100 + number for number in ready}
    found = choose(processes, pids, servers=range_of_servers, chance=random.Random(seed))
    holders = {p.pid for p in processes if p.number not in range_of_servers and p.pid in pids}
    if found is None:
        assert len(holders) <= 1
    elif found.number not in range_of_servers:
        assert holders - {found.pid}


@given(st.sets(numbers, min_size=1), st.integers())
def test_anybody_may_be_killed_if_it_goes_to_the_last(alive, seed):
    processes = [Process(number, 100 + number) for number in sorted(alive)]
    assert choose(processes, set(), servers=range(0), chance=random.Random(seed), to_the_last=True) in processes


def test_everybody_is_chosen_at_times_and_the_same_seed_chooses_the_same():
    processes = [Process(number, 100 + number) for number in range(4)]
    ready = {100, 101, 102}

    def choices(seed: int) -> list[Process | None]:
        chance = random.Random(seed)
        return [choose(processes, ready, servers=range(3, 4), chance=chance) for _ in range(100)]

    assert set(choices(7)) == set(processes)
    assert choices(7) == choices(7) != choices(8)


@pytest.mark.parametrize(
    ("text", "rhythm"),
    [("3s", Rhythm(seconds=3)), ("250ms", Rhythm(seconds=0.25)), ("200 steps", Rhythm(steps=200))],
)
def test_a_rhythm_is_a_time_or_a_number_of_steps(text, rhythm):
    assert read_rhythm(text) == rhythm
    assert read_rhythm(str(rhythm)) == rhythm


@pytest.mark.parametrize("text", ["3", "often", "0s", "0 steps", "-1s"])
def test_a_rhythm_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError):
        read_rhythm(text)


# The thread


def started(run_dir: Path, workers: int = 2, servers: int = 0) -> list[Event]:
    ready: list[Event] = [WorkerReady(rank=n, pid=100 + n, parameters=1, collective="Solo") for n in range(workers)]
    plan = {"workers": [{}] * workers, "servers": servers}
    return [RunStarted(run_dir=str(run_dir), plan=plan, machine={}), *ready]


def progress(step: int) -> Progress:
    return Progress(rank=0, epoch=0, step=step, samples=1, seconds=1.0, cursor=0)


@pytest.fixture
def world(monkeypatch):
    """Processes that exist on paper only; gives who was killed."""
    killed: list[int] = []
    monkeypatch.setattr(kills, "zygote_of", lambda _: 1)
    monkeypatch.setattr(
        kills, "processes_of", lambda *_: [Process(n, 100 + n) for n in range(2) if 100 + n not in killed]
    )
    monkeypatch.setattr(kills, "send", lambda pid, *_, **__: killed.append(pid) or True)
    return killed


def test_nobody_is_killed_before_training_begins_nor_more_than_were_asked_for(tmp_path, world):
    killer = Killer(Rhythm(seconds=0.01), most=1, seed="a", to_the_last=True)
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
    assert (kill.number, kill.step) == (kill.pid - 100, 5)


def test_the_last_worker_is_spared(tmp_path, world):
    killer = Killer(Rhythm(seconds=0.01), most=2, seed="a")
    for event in [*started(tmp_path), progress(1)]:
        killer.on_event(event)
    while not killer.kills:
        threading.Event().wait(0.01)
    killer._thread.join(0.2)
    assert killer._thread.is_alive(), "it waits for somebody whom it may kill"
    killer.close()
    assert len(world) == 1


def test_kills_can_be_counted_in_steps(tmp_path, world):
    killer = Killer(Rhythm(steps=100), most=1, seed="a")
    for event in [*started(tmp_path), progress(1)]:
        killer.on_event(event)
    killer._thread.join(0.1)
    assert not killer.kills
    killer.on_event(progress(200))
    killer._thread.join(10)
    killer.close()
    assert len(killer.kills) == 1


def test_a_run_that_is_over_or_being_stopped_is_left_alone(tmp_path, world):
    over = Killer(Rhythm(seconds=0.05), most=5, seed="a")
    stopped = Killer(Rhythm(seconds=0.05), most=5, seed="a", may_go_on=lambda: False)
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
    assert [process.number for process in found] == [0, 12]
    assert processes_of(tmp_path / "another", family.pid) == []


def test_a_signal_reaches_a_child_that_lives_and_nobody_else(tmp_path, family):
    first, second = processes_of(tmp_path, family.pid)
    assert not send(first.pid, signal.SIGKILL, parent=os.getpid()), "it is not this process's child"
    assert send(first.pid, signal.SIGKILL, parent=family.pid)
    while first in processes_of(tmp_path, family.pid):
        threading.Event().wait(0.01)
    assert not send(first.pid, signal.SIGKILL, parent=family.pid), "it has ended, though nobody has noticed yet"
    assert processes_of(tmp_path, family.pid) == [second]
    assert not send(2**22 + 1, signal.SIGKILL, parent=family.pid), "no process has such a number"
