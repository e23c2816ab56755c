"""Ports of which only the kernel knows: who is connected stays so, and no one else comes in."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from syncline.comms.open_sockets import accept_new_connections, connections, drop_new_connections, listeners

LIMIT_S = 20.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def number_of(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_listeners_and_connections_of_this_process_are_found_and_told_apart(listener):
    with (
        socket.create_connection(listener.getsockname(), timeout=LIMIT_S) as ours,
        listener.accept()[0] as accepted,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socketpair()[0] as local,
    ):
        listening = {number: found.getsockname() for number, found in listeners()}
        connected = {number for number, _ in connections()}
        assert listening[number_of(listener)] == listener.getsockname()
        assert {number_of(ours), number_of(accepted)} <= connected
        assert not {number_of(datagrams), number_of(local), number_of(listener)} & connected
        assert not {number_of(ours), number_of(datagrams), number_of(local)} & set(listening)


def test_a_port_that_drops_new_connections_keeps_those_that_it_has(listener):
    address = listener.getsockname()
    with socket.create_connection(address, timeout=LIMIT_S) as ours, listener.accept()[0] as accepted:
        assert drop_new_connections(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
        ours.sendall(b"still there")
        assert accepted.recv(100) == b"still there"
        accept_new_connections(listener)
        with socket.create_connection(address, timeout=LIMIT_S), listener.accept()[0]:
            pass
        accept_new_connections(listener)  # a second time changes nothing


def test_a_port_whose_descriptor_is_a_librarys_is_closed_through_another(listener):
    with next(found.dup() for number, found in listeners() if number == number_of(listener)) as same:
        drop_new_connections(same)
    with pytest.raises(TimeoutError):
        socket.create_connection(listener.getsockname(), timeout=0.2)
