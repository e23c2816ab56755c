"""What can be known of network namespaces without making one."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from syncline.chaos.links import Links
from syncline.chaos.soak import Settings
from syncline.cli.main import app
from syncline.engines.network import Host, Network
from syncline.errors import ConfigError, SynclineError
from syncline.testing import namespaces
from syncline.testing.faults import LINKS, Fault, Injector
from syncline.testing.namespaces import Namespaces, free_subnet, why_not_possible

SUBNETS = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False), st.integers(0, 2**32 - 1), st.integers(9, 32)
)


@given(st.lists(SUBNETS, max_size=30), st.integers(0, 2**22))
def test_a_free_subnet_is_private_has_room_and_touches_nothing_that_is_taken(taken, seed):
    subnet = free_subnet(taken, seed)
    assert subnet.prefixlen == 24
    assert subnet.is_private
    assert not any(subnet.overlaps(each) for each in taken)


def test_two_processes_take_different_subnets_though_neither_sees_the_others():
    assert free_subnet([], 4711) != free_subnet([], 4712)


def test_a_host_that_has_a_route_to_every_private_network_is_told_so():
    with pytest.raises(SynclineError, match="no private network left"):
        free_subnet(list(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "198.18.0.0/15"))), 0)


def _forbid(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_without_permission_there_are_none_and_it_is_said_what_to_do(monkeypatch):
    monkeypatch.setattr(namespaces, "_call", _forbid)
    why = why_not_possible()
    assert why is not None
    assert "need root" in why
    assert "sudo" in why


def test_the_command_refuses_before_anything_is_started(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(namespaces, "_call", _forbid)
    words = ["chaos", "mlp", "--data", "digits", "--namespaces", "3", "--fault", "cut worker 1 at step 3 for 5s"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError)
    assert "need root" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_without_the_command_ip_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="Install iproute2"):
        Namespaces(2)


@pytest.mark.parametrize("count", [0, -1, 101])
def test_a_number_of_namespaces_that_makes_no_sense_is_refused(count):
    with pytest.raises(ConfigError, match="1 to 100"):
        Namespaces(count)


@pytest.mark.parametrize("count", [1, -2])
def test_a_soak_in_one_namespace_is_refused_because_there_would_be_no_network(count):
    from syncline.chaos.kills import Rhythm

    with pytest.raises(ConfigError, match="must be 2 or more"):
        Settings(strategies=("allreduce",), every=Rhythm(seconds=1), namespaces=count)


# Who cuts the links


class Wires:
    """Namespaces that only write down what was done to them."""

    network = Network("10.0.0.1", (Host("a", "10.0.0.2"), Host("b", "10.0.0.3")))

    def __init__(self, refuses: str = "") -> None:
        self.done: list[tuple[str, int]] = []
        self._refuses = refuses

    def number_of(self, process: int) -> int:
        return process % 2

    def cut(self, number: int) -> None:
        if self._refuses:
            raise SynclineError(self._refuses)
        self.done.append(("cut", number))

    def heal(self, number: int) -> None:
        self.done.append(("heal", number))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def _cut(worker: int, for_s: float | None, run_dir: Path) -> None:
    """What worker `worker` does when it comes to the step."""
    Injector([Fault("cut", 0, worker, for_s=for_s)]).at_step(worker, 0, run_dir)


def test_a_worker_has_its_link_cut_before_it_begins_the_step_and_healed_after_the_time(tmp_path):
    wires = Wires()
    with Links(wires):  # type: ignore[arg-type]
        began = time.monotonic()
        _cut(3, 0.2, tmp_path)
        assert wires.done == [("cut", 1)]
        _until(lambda: len(wires.done) == 2)
        assert time.monotonic() - began > 0.15
        assert wires.done == [("cut", 1), ("heal", 1)]
    assert LINKS not in os.environ


def test_a_link_that_is_cut_for_good_is_healed_when_the_run_is_over(tmp_path):
    wires = Wires()
    with Links(wires):  # type: ignore[arg-type]
        _cut(0, None, tmp_path)
    assert wires.done == [("cut", 0), ("heal", 0)]


def test_a_link_that_is_cut_twice_is_healed_when_the_longer_time_is_over(tmp_path):
    wires = Wires()
    for name in "ab":
        (tmp_path / name).mkdir()
    with Links(wires):  # type: ignore[arg-type]
        began = time.monotonic()
        _cut(1, 60, tmp_path / "a")
        _cut(1, 0.01, tmp_path / "b")
        _until(lambda: time.monotonic() - began > 0.05)
        assert wires.done == [("cut", 1), ("cut", 1)]
    assert wires.done == [("cut", 1), ("cut", 1), ("heal", 1)]


def test_a_link_that_cannot_be_cut_is_the_workers_error(tmp_path):
    with Links(Wires("it is welded")), pytest.raises(RuntimeError, match="worker 0 could not be cut: it is welded"):  # type: ignore[arg-type]
        _cut(0, 1, tmp_path)
