"""Runs in network namespaces: the same result as on one machine, and links that are really cut. For root only."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_runs import environment, final_state, relative_difference, samples, small_net
from real_runs import syncline as command

import syncline
from syncline.config.run import RunConfig
from syncline.driver import run_task
from syncline.engines.network import Network
from syncline.errors import ConfigError, SynclineError
from syncline.lab.namespaces import Namespaces, why_not_possible
from syncline.task import Task
from syncline.telemetry.events import Event, ExchangeStats, Recovered, RunStarted, WorkerFailure
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("network")  # one process, because these tests share the kernel's network

LIMIT_S = 30.0
CUT_S = 5.5
"""Longer than any silence that is put up with: three times 1.5 s, if this run has seen one of that length."""


@pytest.fixture(scope="module", autouse=True)
def _only_where_it_is_possible() -> None:
    if (why := why_not_possible()) is not None:
        pytest.skip(why)


@pytest.fixture(autouse=True)
def _leaves_no_network_behind() -> Iterator[None]:
    links, namespaces = links_of(os.getpid()), namespaces_held()
    yield
    assert links_of(os.getpid()) == links
    assert namespaces_held() == namespaces
    until(lambda: not links_of_the_dead(), "the kernel removes what the dead have left")


def links_of(pid: int) -> set[str]:
    """The interfaces on this host that a process has made."""
    return {name for _, name in socket.if_nameindex() if name.startswith(f"sl{pid}-")}


def links_of_the_dead() -> list[str]:
    """The interfaces of processes that are gone; others may be testing on this machine, too."""
    made = [re.fullmatch(r"sl(\d+)-\d+", name) for _, name in socket.if_nameindex()]
    return [found[0] for found in made if found is not None and not Path("/proc", found[1]).exists()]


def namespaces_held() -> list[str]:
    """The network namespaces that this process has a descriptor of."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # the one of this listing
    return sorted(name for name in found if name.startswith("net:["))


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        threading.Event().wait(0.01)


# The network itself


def test_what_is_sent_over_a_link_that_is_cut_arrives_when_it_is_healed_and_until_then_nobody_is_told():
    with Namespaces(2) as bed:
        address = bed.network.hosts[0].address
        listener = bed.inside(0, lambda: socket.create_server((address, 0)))
        with listener, bed.inside(1, lambda: socket.create_connection(listener.getsockname(), LIMIT_S)) as sender:
            receiver, (came_from, _) = listener.accept()
            with receiver:
                assert came_from == bed.network.hosts[1].address
                bed.cut(1)
                sender.sendall(b"hello")
                receiver.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    receiver.recv(5)
                assert sender.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                bed.heal(1)
                receiver.settimeout(LIMIT_S)
                assert receiver.recv(5) == b"hello"


def test_a_cut_is_of_one_link_only():
    with Namespaces(3) as bed, socket.create_server((bed.network.driver, 0)) as driver:

        def reach() -> None:
            socket.create_connection(driver.getsockname(), 0.5).close()

        bed.cut(1)
        bed.inside(0, reach)
        with pytest.raises(TimeoutError):
            bed.inside(1, reach)
        bed.inside(2, reach)


def test_no_more_gets_through_than_the_limit():
    with Namespaces(2) as bed:
        bed.limit(1, "16mbit")
        with socket.create_server((bed.network.driver, 0)) as driver:
            sender = bed.inside(1, lambda: socket.create_connection(driver.getsockname(), LIMIT_S))
            receiver, _ = driver.accept()
            with sender, receiver:
                began = time.monotonic()
                threading.Thread(target=lambda: sender.sendall(bytes(1_000_000))).start()
                left = 1_000_000
                while left:
                    left -= len(receiver.recv(65536))
                assert time.monotonic() - began > 0.25, "a million bytes, without the first quarter, at 2 MB/s"


HOLD = """
import sys
from syncline.lab.namespaces import Namespaces
with Namespaces(2):
    print("made", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_network_whoever_ends_its_process(how):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == "made\n"
        assert len(links_of(holder.pid)) == 1
        holder.send_signal(how)
        holder.wait(LIMIT_S)
    until(lambda: not links_of(holder.pid), "the link is gone")


def test_a_network_that_cannot_be_completed_is_taken_away_again(monkeypatch):
    steps = itertools.count()
    from syncline.lab import namespaces

    really = namespaces._ip

    def fail_at_the_third(*order: Any) -> None:
        if next(steps) == 3:
            raise SynclineError("no more")
        really(*order)

    monkeypatch.setattr(namespaces, "_ip", fail_at_the_third)
    with pytest.raises(SynclineError, match="no more"):
        Namespaces(3)


# Runs in it


class Told:
    """A view that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def train(
    folder: Path, network: Network | None, told: Told | None = None, **settings: Any
) -> tuple[syncline.Result, dict[str, Any]]:
    """A short run, and its plan."""
    task = Task(
        model=small_net(), data=samples(), test=samples(57, seed=2), loss="cross_entropy",
        optimizer=syncline.sgd(lr=0.05, momentum=0.9),
    )  # fmt: skip
    config = RunConfig(**{"workers": 3, "batch": 10, "epochs": 5, "max_steps": 50, "out": str(folder), **settings})
    told = told or Told()
    result = run_task(task, config, told, network=network)
    return result, next(e.plan for e in told.events if isinstance(e, RunStarted))


def test_three_workers_in_namespaces_train_the_same_parameters_as_on_one_machine(tmp_path):
    here, _ = train(tmp_path / "here", None)
    with Namespaces(3) as bed:
        there, plan = train(tmp_path / "there", bed.network)
    assert [worker["host"] for worker in plan["workers"]] == ["namespace-0", "namespace-1", "namespace-2"]
    assert plan["collective"] == "process-group"
    states = [final_state(result.run_dir)["model"] for result in (here, there)]
    assert relative_difference(*states) < 1e-5


def test_h2o_shares_memory_inside_each_host_and_combines_updates_between_them(tmp_path):
    with Namespaces(2) as bed:
        told = Told()
        result, plan = train(tmp_path, bed.network, told, strategy="h2o", workers=4, epochs=8)
    assert plan["shares_memory_on_hosts"]
    assert len({worker["host"] for worker in plan["workers"]}) == 2
    assert result.metrics["test/accuracy"] > 0.7
    exchanged = [e for e in told.events if isinstance(e, ExchangeStats)]
    sent = {rank: sum(e.bytes_sent for e in exchanged if e.worker_id == rank) for rank in range(4)}
    # The first worker of each host, dealt out in turn, speaks for it; inside a host nothing is sent but small news.
    assert min(sent[0], sent[1]) > 10 * max(sent[2], sent[3]) > 0


def test_memory_is_not_shared_between_namespaces(tmp_path):
    with Namespaces(2) as bed:
        with pytest.raises(ConfigError, match=r"2 hosts.*h2o"):
            train(tmp_path, bed.network, strategy="hogwild")
        with pytest.raises(ConfigError, match=r"shared-memory.*2 hosts"):
            train(tmp_path, bed.network, collective="shared-memory")


def chaos(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The score of a soak with three workers and, if there is one, a server, each behind its own link."""
    done = command(
        "chaos", "mlp", "--data", "digits", "--workers", "3", "--namespaces", "4", "--references", "0",
        "--hang-after", "30s", "--json", *arguments,
        cwd=tmp_path, timeout_s=170,
    )  # fmt: skip
    assert done.code == 0, done.out[-3000:] + done.err
    score: dict[str, Any] = done.events[-1]
    assert score["total"]["lost"] == score["total"]["repeated"] == 0, "the ledger's account"
    return score


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
def test_a_worker_that_is_cut_off_is_given_up_and_the_others_go_on_while_the_link_is_still_cut(tmp_path, strategy):
    score = chaos(
        tmp_path, "--strategy", strategy, "--epochs", "9",
        "--fault", "slow worker 0 at step 0 by 0.05s", "--fault", f"cut worker 1 at step 20 for {CUT_S}s",
    )  # fmt: skip
    (run,) = score["runs"]
    cut = next(r for r in run["recoveries"] if r["injection"]["what"].startswith("cut"))
    assert cut["result"] == "recovered"
    assert cut["detected_s"] < cut["recovered_s"] < CUT_S < cut["restored_s"]
    events = list(RunDir(tmp_path / run["run_dir"]).read_events())
    (lost,) = (e for e in events if isinstance(e, WorkerFailure))
    assert (lost.worker_id, lost.is_replaced) == (1, True)
    assert "no heartbeat" in lost.cause
    members = [e.members for e in events if isinstance(e, Recovered)]
    assert members[0] == [0, 2]
    assert members[-1] == [0, 1, 2], "its replacement, in the same place, when the link was whole again"


def test_a_short_cut_costs_a_moment_and_no_sample(tmp_path):
    score = chaos(
        tmp_path, "--strategy", "allreduce", "--strategy", "ssp", "--epochs", "4",
        "--fault", "cut worker 1 at step 20 for 500ms",
    )  # fmt: skip
    result = [r["result"] for run in score["runs"] for r in run["recoveries"]]
    assert len(result) == 2
    assert set(result) <= {"tolerated", "recovered"}
