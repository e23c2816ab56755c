"""Where processes are, and at which address each is reached."""

from __future__ import annotations

from syncline.comms.torch_group import interface_of
from syncline.engines.network import LOOPBACK, Host, Network


def test_processes_are_assigned_to_hosts_in_turn_and_a_replacement_to_the_same_host():
    network = Network("10.0.0.1", tuple(Host(name, f"10.0.0.{i + 2}") for i, name in enumerate("abc")))
    assert [network.host_of(worker_id).name for worker_id in range(7)] == list("abcabca")


def test_by_default_all_processes_use_the_loopback_address():
    assert {LOOPBACK.driver, *(LOOPBACK.host_of(n).address for n in range(5))} == {"127.0.0.1"}


def test_an_address_belongs_to_an_interface_or_to_none():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    assert interface_of("::1") is None, "gloo is then left to choose"
