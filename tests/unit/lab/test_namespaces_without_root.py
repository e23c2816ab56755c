"""Network namespaces, as far as they can be tested without root."""

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

from syncline.cli.main import app
from syncline.engines.network import Host, Network
from syncline.errors import ConfigError, SynclineError
from syncline.lab import namespaces
from syncline.lab.chaos.links import LinkCutter
from syncline.lab.chaos.soak import ChaosSettings
from syncline.lab.faults import LINKS, Fault, Injector
from syncline.lab.namespaces import Namespaces, free_subnet, why_not_possible

SUBNETS = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False), st.integers(0, 2**32 - 1), st.integers(9, 32)
)


@given(st.lists(SUBNETS, max_size=30), st.integers(0, 2**22))
def test_a_free_subnet_is_private_has_room_and_overlaps_no_other(taken, seed):
    subnet = free_subnet(taken, seed)
    assert subnet.prefixlen == 24
    assert subnet.is_private
    assert not any(subnet.overlaps(each) for each in taken)


def test_two_processes_take_different_subnets_without_seeing_each_other():
    assert free_subnet([], 4711) != free_subnet([], 4712)


def test_a_host_with_routes_to_every_private_network_gets_an_error():
    with pytest.raises(SynclineError, match="private"):
        free_subnet(list(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "198.18.0.0/15"))), 0)


def _forbid(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_without_permission_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(namespaces, "_call", _forbid)
    reason = why_not_possible()
    assert reason is not None
    assert "root" in reason
    assert "sudo" in reason


def test_the_command_fails_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(namespaces, "_call", _forbid)
    words = ["chaos", "mlp", "--data", "digits", "--namespaces", "3", "--fault", "cut worker 1 at step 3 for 5s"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError)
    assert "root" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_without_the_command_ip_the_error_names_the_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="iproute2"):
        Namespaces(2)


@pytest.mark.parametrize("count", [0, -1, 101])
def test_an_invalid_number_of_namespaces_is_rejected(count):
    with pytest.raises(ConfigError, match="1 to 100"):
        Namespaces(count)


@pytest.mark.parametrize("count", [1, -2])
def test_a_soak_test_in_one_namespace_is_rejected(count):
    from syncline.lab.chaos.kills import KillInterval

    with pytest.raises(ConfigError, match="2 or more"):
        ChaosSettings(strategies=("allreduce",), every=KillInterval(seconds=1), namespaces=count)


# Cutting links


class Wires:
    """Namespaces that only record the calls."""

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
    """What the worker does when it reaches the step."""
    Injector([Fault("cut", 0, worker, for_s=for_s)]).at_step(worker, 0, run_dir)


def test_a_link_is_cut_before_the_step_begins_and_restored_after_the_time(tmp_path):
    wires = Wires()
    with LinkCutter(wires):  # type: ignore[arg-type]
        began = time.monotonic()
        _cut(3, 0.2, tmp_path)
        assert wires.done == [("cut", 1)]
        _until(lambda: len(wires.done) == 2)
        assert time.monotonic() - began > 0.15
        assert wires.done == [("cut", 1), ("heal", 1)]
    assert LINKS not in os.environ


def test_a_link_cut_without_a_time_is_restored_at_the_end_of_the_run(tmp_path):
    wires = Wires()
    with LinkCutter(wires):  # type: ignore[arg-type]
        _cut(0, None, tmp_path)
    assert wires.done == [("cut", 0), ("heal", 0)]


def test_a_link_cut_twice_is_restored_after_the_longer_time(tmp_path):
    wires = Wires()
    for name in "ab":
        (tmp_path / name).mkdir()
    with LinkCutter(wires):  # type: ignore[arg-type]
        began = time.monotonic()
        _cut(1, 60, tmp_path / "a")
        _cut(1, 0.01, tmp_path / "b")
        _until(lambda: time.monotonic() - began > 0.05)
        assert wires.done == [("cut", 1), ("cut", 1)]
    assert wires.done == [("cut", 1), ("cut", 1), ("heal", 1)]


def test_a_link_that_cannot_be_cut_is_an_error_of_the_worker(tmp_path):
    with (
        LinkCutter(Wires("it is welded")),  # type: ignore[arg-type]
        pytest.raises(RuntimeError, match=r"worker 0.*it is welded"),
    ):
        _cut(0, 1, tmp_path)
