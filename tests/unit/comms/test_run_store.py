"""The store of a run: who knows the secret can use it, every wait ends, and no worker's death harms the others."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from syncline.comms.connection import ClientConnection
from syncline.comms.parameter_server.messages import decode_from_server
from syncline.comms.store import HostedStore, RunStore, connect_store, host_store
from syncline.errors import PeerFailed

SECRET = b"s" * 32
LIMIT_S = 20.0


@pytest.fixture
def host() -> Iterator[HostedStore]:
    store, _ = host_store("127.0.0.1", SECRET)
    yield store
    store.close()


@contextlib.contextmanager
def connected(host: HostedStore, prefix: str = "view-0", timeout_s: float = LIMIT_S, **how) -> Iterator[RunStore]:
    store = connect_store("127.0.0.1", host.port, prefix, timeout_s, **{"secret": SECRET, **how})
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def meanwhile(work) -> Iterator[list]:
    """Another thread does `work`; what it returned or raised is in the list afterwards."""
    came_to: list = []

    def run() -> None:
        try:
            came_to.append(work())
        except Exception as error:
            came_to.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield came_to
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def is_open(stranger: socket.socket) -> bool:
    """Whether the store still keeps it; its challenge is read before."""
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return True
    return False


def test_what_one_worker_writes_another_reads(host):
    with connected(host) as one, connected(host) as other:
        one.set("address", b"\x00\xff")
        assert other.get("address") == b"\x00\xff"
        assert other.add("count", 2) == 2
        assert one.add("count", 3) == 5
        assert other.get("count") == b"5"
        assert one.check(["address", "count"])
        assert not one.check(["address", "nothing"])
        assert one.delete_key("address")
        assert not other.check(["address"])


def test_each_view_has_keys_of_its_own(host):
    with connected(host, "view-0") as before, connected(host, "view-1") as after:
        before.set("rank-0", "old")
        after.set("rank-0", "new")
        assert (before.get("rank-0"), after.get("rank-0")) == (b"old", b"new")
        nested = dist.PrefixStore("split-1", after)
        assert not nested.check(["rank-0"])
        nested.set("rank-0", "nested")
        assert after.get("split-1/rank-0") == b"nested"
        assert after.num_keys() == 3


def test_a_wait_ends_as_soon_as_the_last_key_is_there(host):
    with connected(host) as one, connected(host) as other:
        one.set("a", "1")
        with meanwhile(lambda: other.wait(["a", "b"])) as came_to:
            one.set("b", "2")
        assert came_to == [None]


def test_a_wait_ends_after_its_limit_and_names_what_was_missing(host):
    with connected(host, timeout_s=0.2) as store:
        store.set("there", "1")
        start = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"0\.2 s.*view-0/missing"):
            store.get("missing")
        with pytest.raises(dist.DistStoreError, match=r"0\.1 s"):
            store.wait(["there", "missing"], timedelta(seconds=0.1))
        store.set_timeout(timedelta(seconds=0.05))  # as torch sets it
        with pytest.raises(RuntimeError, match=r"0\.05 s"):
            store.wait(["missing"])
        assert time.monotonic() - start < LIMIT_S
        assert store.get("there") == b"1"  # the connection is as good as before


def test_a_wait_ends_when_the_run_is_aborted(host):
    over = threading.Event()
    with connected(host, should_stop=over.is_set) as store:
        with meanwhile(lambda: store.get("never")) as came_to:
            over.set()
        assert isinstance(came_to[0], dist.DistNetworkError)
        assert "The run was aborted" in str(came_to[0])


def test_a_wait_ends_when_the_store_does():
    host, _ = host_store("127.0.0.1", SECRET)
    with connected(host) as store:
        with meanwhile(lambda: store.get("never")) as came_to:
            host.close()
        assert isinstance(came_to[0], dist.DistNetworkError)
        with pytest.raises(dist.DistNetworkError):
            store.set("a", "b")


def test_the_death_of_a_worker_that_waits_leaves_the_others_alone(host):
    with connected(host) as survivor:
        with connected(host) as victim, meanwhile(lambda: victim.get("never")) as came_to:
            victim._connection.interrupt()  # what the kernel does to the connections of a process that is killed
        assert isinstance(came_to[0], dist.DistNetworkError)
        survivor.set("a", "1")
        assert survivor.get("a") == b"1"


def test_what_cannot_be_done_is_refused_and_the_store_goes_on(host):
    with connected(host) as store:
        store.set("text", "abc")
        with pytest.raises(dist.DistStoreError, match="invalid literal"):
            store.add("text", 1)
        store.set("large", str(2**63 - 1))
        with pytest.raises(dist.DistStoreError, match="more than 64 bits"):
            store.add("large", 1)
        assert store.get("text") == b"abc"


def test_a_clone_is_a_connection_of_its_own_that_torch_can_hold_alone(host):
    with connected(host) as store:
        nested = dist.PrefixStore("x", store).clone()
        gc.collect()
        nested.set("a", "1")
        assert store.get("x/a") == b"1"


def test_who_lacks_the_secret_reads_and_writes_nothing(host):
    with connected(host) as store:
        store.set("a", "1")
        for wrong in (b"", b"wrong" * 7):
            with pytest.raises(dist.DistNetworkError, match="during the handshake"):
                connect_store("127.0.0.1", host.port, "view-0", LIMIT_S, wrong)
        assert store.get("a") == b"1"
        assert store.num_keys() == 1


def test_what_is_proved_to_the_store_is_no_proof_to_a_server_of_parameters(host):
    with pytest.raises(PeerFailed, match="during the handshake"):
        ClientConnection(
            f"127.0.0.1:{host.port}",
            SECRET,
            decode_from_server,
            what="Shard 0",
            timeout_s=LIMIT_S,
            should_stop=lambda: False,
        )


def test_a_worker_gives_nothing_to_a_store_that_does_not_know_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> bytes:
            with listener.accept()[0] as connection:
                connection.sendall(os.urandom(32))
                connection.recv(64)
                connection.sendall(os.urandom(32))
                return connection.recv(4096)

        with (
            meanwhile(pretend) as heard,
            pytest.raises(dist.DistNetworkError, match="does not know this run's secret"),
        ):
            connect_store("127.0.0.1", listener.getsockname()[1], "view-0", LIMIT_S, SECRET)
    assert heard == [b""]


def test_what_is_no_request_ends_that_connection_only(host):
    with connected(host) as store, connected(host) as bad:
        bad._connection._socket.sendall(b"\xff" * 1000)
        with pytest.raises(dist.DistNetworkError):
            bad.get("a")
        store.set("a", "1")
        assert store.get("a") == b"1"


def test_a_thousand_half_open_connections_hold_up_nobody(host):
    with contextlib.ExitStack() as crowd:
        address = ("127.0.0.1", host.port)
        strangers = [crowd.enter_context(socket.create_connection(address, timeout=LIMIT_S)) for _ in range(1000)]
        with connected(host) as store:
            store.set("a", "1")
            assert store.get("a") == b"1"
            assert sum(is_open(s) for s in strangers) < 300, "the store keeps only so many of them"


def test_the_store_listens_on_the_given_host_only(host):
    hexadecimal = f"{host.port:04X}"
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A" and hexadecimal in line.split()[1]]
    assert listening == [f"0100007F:{hexadecimal}"]


def test_a_store_that_nobody_holds_any_more_ends():
    store, port = host_store("127.0.0.1", SECRET)
    thread = store._thread
    del store
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(dist.DistNetworkError, match=f"Store 127.0.0.1:{port} cannot be reached"):
        connect_store("127.0.0.1", port, "view-0", LIMIT_S, SECRET)
