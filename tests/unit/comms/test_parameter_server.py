"""Parameter servers: who may connect, what a server bears, and that every wait ends."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading

import msgspec
import pytest
import torch
from torch import nn

from syncline.comms.connection import ClientConnection
from syncline.comms.listener import ServerConnection, listen
from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.channel import _Pending
from syncline.comms.parameter_server.chunks import ParameterChunk, chunks_in, overlap
from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.server import serve
from syncline.comms.segment import Segment, why_not_supported
from syncline.comms.shared_buffer import SharedBuffer
from syncline.errors import ConfigError, PeerFailed, SynclineError
from syncline.testing.threads import servers_on_threads

SECRET = b"s" * 32
LIMIT_S = 20.0
shares_memory = pytest.mark.skipif(why_not_supported() is not None, reason="needs shared memory")


def begin(servers: ParameterServers, numel: int = 6, rule: str = "apply", **how) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(numel))]
    servers.begin(parameters, torch.optim.SGD(parameters, lr=1.0), rule=rule, **how)
    return parameters


def pulled(servers: ParameterServers, numel: int = 6) -> torch.Tensor:
    out = torch.empty(numel)
    servers.pull(out)
    return out


@contextlib.contextmanager
def one_server(size: int = 1, **how):
    """A server whose address and secret are known, as (address, list of failed workers, list of how it ended)."""
    ready, over = threading.Event(), threading.Event()
    addresses: list[str] = []
    failed: list[int] = []
    ended: list = []

    def on_ready(address):
        addresses.append(address)
        ready.set()

    def run():
        ended.append(
            serve(
                "127.0.0.1",
                SECRET,
                shard_index=0,
                shards=1,
                size=size,
                on_ready=on_ready,
                should_stop=over.is_set,
                on_worker_failed=failed.append,
            )
        )

    thread = threading.Thread(target=run, daemon=True, name="syncline-test-server")
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield addresses[0], failed, ended
    finally:
        over.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def connect(address: str, rank: int = 0, size: int = 1, secret: bytes = SECRET, **how) -> ParameterServers:
    return ParameterServers([address], secret, rank=rank, size=size, **{"timeout_s": LIMIT_S, **how})


def raw(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def test_a_wrong_secret_is_refused_and_the_server_continues():
    with one_server() as (address, _, _):
        with pytest.raises(PeerFailed, match="Shard 0 of 1") as caught:
            connect(address, secret=b"wrong" * 7)
        assert caught.value.code == "secret-rejected"
        with connect(address) as servers:
            begin(servers)
            assert pulled(servers).tolist() == [0.0] * 6


def test_nothing_is_read_from_a_connection_that_has_not_proved_itself():
    with one_server() as (address, _, _):
        for data in (pickle.dumps(Bomb()) * 20, b"\0" * 64, b"\xff" * 1000):
            with raw(address) as stranger:
                stranger.sendall(data)
                with contextlib.suppress(ConnectionResetError):  # what was not read makes the kernel say it so
                    while stranger.recv(4096):  # the challenge, then the end
                        pass
        with raw(address), connect(address) as servers:  # one that says nothing at all
            begin(servers)
            assert pulled(servers).tolist() == [0.0] * 6


def test_a_worker_does_not_talk_to_a_server_that_does_not_know_the_secret():
    received = []
    with listen("127.0.0.1") as listener:

        def pretend():
            with listener.accept()[0] as connection:
                connection.sendall(b"c" * 32)
                connection.recv(64)
                connection.sendall(b"p" * 32)
                while data := connection.recv(4096):
                    received.append(data)

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(PeerFailed) as caught:
            connect(f"127.0.0.1:{listener.getsockname()[1]}")
        assert caught.value.code == "impostor"
        thread.join(LIMIT_S)
    assert received == []


def test_an_invalid_message_ends_that_connection_only():
    with one_server() as (address, failed, _), connect(address) as servers:
        begin(servers)
        hello = msgspec.msgpack.encode(m.Connect(0, 1, 1, True))
        prefix = struct.Struct("<IQ?51x")  # a frame's parts are filled up to 64 bytes
        for frame in (
            prefix.pack(3, 0, False) + b"abc".ljust(64, b"\0"),
            prefix.pack(2**31, 0, False),
            prefix.pack(len(hello), 2**62, False) + hello.ljust(64, b"\0"),
            prefix.pack(len(hello), 2**64 - 1, False) + hello.ljust(64, b"\0"),
            prefix.pack(len(hello), 8, True) + hello.ljust(64, b"\0"),
        ):
            link = ClientConnection(
                address, SECRET, m.decode_from_server, what="Shard 0", timeout_s=LIMIT_S, should_stop=lambda: False
            )
            link._socket.sendall(frame)
            with pytest.raises(PeerFailed, match="closed the connection"):
                link.receive()
            link.close()
        assert pulled(servers).tolist() == [0.0] * 6
        assert failed == []


def test_a_worker_of_a_run_of_another_size_is_refused():
    with one_server(size=2) as (address, _, _):
        servers = connect(address, 0, size=3)
        with pytest.raises(SynclineError, match=r"Rank 0 of 3 .* 2 workers"):
            begin(servers)
        servers.close(goodbye=False)


def test_a_gate_that_is_asked_for_anew_leaves_nothing_behind():
    with one_server(size=2) as (address, _, _), connect(address, 0, 2) as quick, connect(address, 1, 2) as slow:
        thread = threading.Thread(target=begin, args=(slow,), daemon=True)
        thread.start()
        begin(quick)
        thread.join(LIMIT_S)
        for _ in range(50):
            quick.tick()
            assert not quick.gate(0, 0.0)
        slow.tick(50)
        assert quick.gate(0, LIMIT_S)
        pulled(quick)
        assert quick._channels[0].pending == {}


def test_a_repeated_push_is_applied_once():
    with one_server() as (address, _, _), connect(address) as servers:
        begin(servers)
        channel = servers._channels[0]
        update = m.GradientFormat(rows=[], spans=None, codec=None, numel=6)
        for _ in range(3):
            channel.pending[50] = _Pending()
            channel.connection.send(m.Push(50, 1, 1.0, 0, update, None), [torch.ones(6)])
            channel.await_reply(50)
        assert pulled(servers).tolist() == [-1.0] * 6


def test_a_server_that_is_gone_is_named():
    with one_server() as (address, _, _):
        servers = connect(address)
        begin(servers)
    with pytest.raises(PeerFailed, match=rf"[Ss]hard 0 of 1 \({address}\)"):
        servers.pull(torch.empty(6))
    servers.close()
    with pytest.raises(PeerFailed, match=rf"Shard 0 of 1 \({address}\)") as caught:
        connect(address)
    assert caught.value.code == "unreachable"


def test_every_wait_has_a_limit():
    with one_server(size=2) as (address, _, _):
        servers = connect(address, size=2, timeout_s=0.3)
        with pytest.raises(PeerFailed, match=r"Shard 0 of 1 .* 0\.3 s") as caught:
            begin(servers)  # the other worker never connects
        assert (caught.value.code, caught.value.facts["timeout_s"]) == ("timeout", 0.3)
        servers.close(goodbye=False)


def test_a_wait_is_given_up_when_the_run_is_aborted():
    asked = threading.Event()

    def should_stop():
        asked.set()
        return True

    with one_server(size=2) as (address, _, _):
        servers = connect(address, size=2, should_stop=should_stop)
        with pytest.raises(PeerFailed, match="Shard 0 of 1") as caught:
            begin(servers)
        assert caught.value.code == "aborted"
        assert asked.is_set()
        servers.close(goodbye=False)


def test_a_server_ends_when_all_have_said_goodbye_and_reports_failed_workers():
    with one_server(size=2) as (address, failed, ended):
        first, second = connect(address, 0, 2), connect(address, 1, 2)
        thread = threading.Thread(target=begin, args=(second,), daemon=True)
        thread.start()
        begin(first)
        thread.join(LIMIT_S)
        second.close(goodbye=False)
        while not first.gate(0, 0.1):
            pass
        first.push(torch.ones(6), weight=1.0)
        first.close()
    assert failed == [1]
    assert ended[0].failed == (1,)
    assert ended[0].finished == {0}
    assert ended[0].updates == 1

    with one_server(size=1) as (address, failed, ended):
        connect(address).close()
        for thread in threading.enumerate():
            if thread.name == "syncline-test-server":
                thread.join(LIMIT_S)
        assert ended[0].finished == {0}
    assert failed == []


def test_goodbye_waits_until_all_pushes_are_applied():
    with one_server(size=2) as (address, _, _):
        first, second = connect(address, 0, 2), connect(address, 1, 2, share_memory=False)
        thread = threading.Thread(target=begin, args=(second, 500_000), daemon=True)
        thread.start()
        begin(first, 500_000)
        thread.join(LIMIT_S)
        for _ in range(5):
            second.push(torch.ones(500_000), weight=1.0)
        second.close()
        assert torch.equal(pulled(first, 500_000), torch.full((500_000,), -5.0))
        first.close()


def test_a_worker_that_does_not_read_holds_up_no_other_and_gets_the_version_it_requested():
    """The parameters it asked for are those of that moment, though they change while they wait to be sent."""
    numel = 4_000_000  # more than sockets hold
    with one_server(size=2) as (address, _, _):
        lazy, quick = connect(address, 0, 2, share_memory=False), connect(address, 1, 2, share_memory=False)
        thread = threading.Thread(target=begin, args=(quick, numel), daemon=True)
        thread.start()
        begin(lazy, numel)
        thread.join(LIMIT_S)
        channel = lazy._channels[0]
        out = torch.empty(numel)
        id_ = channel.expect([out])
        channel.connection.send(m.Pull(id_, 0, None))
        for _ in range(3):
            quick.push(torch.ones(numel), weight=1.0)
        assert torch.equal(pulled(quick, numel), torch.full((numel,), -3.0))
        version = channel.await_reply(id_).version
        assert torch.equal(out, torch.full((numel,), -float(version)))
        lazy.close()
        quick.close()


@shares_memory
def test_attaching_to_a_shared_buffer_needs_its_token():
    buffer = SharedBuffer.create(100)
    assert buffer is not None
    try:
        other = SharedBuffer.attach(buffer.address, buffer.token, 100)
        assert other is not None
        buffer.bytes.fill_(7)
        assert other.bytes.tolist() == [7] * 100
        assert SharedBuffer.attach(buffer.address, b"x" * 16, 100) is None
        assert SharedBuffer.attach(buffer.address, buffer.token, 99) is None
        assert SharedBuffer.attach("/proc/1/fd/0", buffer.token, 100) is None
        assert SharedBuffer.attach("", b"", 0) is None
    finally:
        buffer.seal()
    assert SharedBuffer.attach(buffer.address, buffer.token, 100) is None


@shares_memory
def test_a_server_that_cannot_attach_to_the_buffer_is_reached_through_the_socket(monkeypatch):
    monkeypatch.setattr(SharedBuffer, "attach", classmethod(lambda *_: None))
    with one_server() as (address, _, _), connect(address) as servers:
        begin(servers)
        assert not servers.uses_shared_memory
        servers.push(torch.ones(6), weight=1.0)
        assert pulled(servers).tolist() == [-1.0] * 6


@shares_memory
def test_without_memory_for_a_buffer_the_socket_is_used(monkeypatch):
    def refuse(size_bytes, name):
        raise OSError("no space left")

    with one_server() as (address, _, _), connect(address) as servers:
        begin(servers)
        assert servers.uses_shared_memory
        monkeypatch.setattr(Segment, "create", refuse)
        begin(servers, 8)  # another size: the server must forget the first shared buffer
        assert not servers.uses_shared_memory
        servers.push(torch.ones(8), weight=1.0)
        assert pulled(servers, 8).tolist() == [-1.0] * 8


def test_channels_last_parameters_keep_their_order_in_memory():
    weight = nn.Parameter(torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    optimizer.state[weight] = {"momentum_buffer": weight.detach().clone(memory_format=torch.preserve_format)}
    with servers_on_threads(2, 1) as start, start(0) as servers:
        servers.begin([weight], optimizer, rule="apply")
        out = pulled(servers, 48)
        in_memory = weight.detach().as_strided((48,), (1,))
        assert torch.equal(out, in_memory)
        servers.push(torch.zeros(48), weight=1.0)
        assert torch.equal(pulled(servers, 48), in_memory * 0.5)


def test_other_types_of_parameters_are_refused():
    with one_server() as (address, _, _), connect(address) as servers:
        parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
        with pytest.raises(ConfigError, match=r"float32.*torch\.float64 on cpu") as caught:
            servers.begin(parameters, torch.optim.SGD(parameters, lr=0.1), rule="apply")
        assert caught.value.facts == {"dtype": "torch.float64", "device": "cpu"}


@pytest.mark.parametrize(
    ("gradient", "facts"),
    [
        (torch.ones(5), r"\b6 values.*\b5\b"),
        (torch.ones(6, dtype=torch.float64), r"float32.*float64"),
        (torch.ones(12)[::2], "contiguous"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_before_anything_is_sent(gradient, facts):
    with one_server() as (address, _, _), connect(address) as servers:
        begin(servers)
        with pytest.raises(ValueError, match=facts):
            servers.push(gradient, weight=1.0)
        assert servers.clock == 0
        assert pulled(servers).tolist() == [0.0] * 6


def test_an_optimizer_error_is_reported_and_the_server_continues():
    with one_server() as (address, _, _), connect(address) as servers:
        parameters = [nn.Parameter(torch.zeros(3, 2))]
        # SparseAdam takes no dense gradients.
        servers.begin(parameters, torch.optim.SparseAdam(parameters), rule="apply", sparse=[False])
        servers.push(torch.ones(6), weight=1.0)
        with pytest.raises(Exception, match="SparseAdam does not support dense gradients"):
            servers.pull(torch.empty(6))
        begin(servers)
        servers.push(torch.ones(6), weight=1.0)
        assert pulled(servers).tolist() == [-1.0] * 6


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_prefetch_that_waits_for_a_failed_update_fails_at_once(is_waiting):
    with one_server() as (address, _, _), connect(address) as servers:
        parameters = [nn.Parameter(torch.zeros(3, 2))]
        servers.begin(parameters, torch.optim.SparseAdam(parameters), rule="apply", sparse=[False])
        if is_waiting:
            servers.prefetch()
            assert servers.take_prefetched(torch.empty(6), 20.0)
        servers.push(torch.ones(6), weight=1.0)
        servers.prefetch()
        with pytest.raises(Exception, match="SparseAdam does not support dense gradients"):
            servers.take_prefetched(torch.empty(6), 20.0)
        with pytest.raises(Exception, match="SparseAdam does not support dense gradients"):
            servers.pull(torch.empty(6))  # the answer to the push itself
        begin(servers)
        servers.push(torch.ones(6), weight=1.0)
        servers.prefetch()
        out = torch.empty(6)
        assert servers.take_prefetched(out, 20.0)
        assert out.tolist() == [-1.0] * 6


def test_more_shards_than_rows_leave_some_empty():
    with servers_on_threads(4, 1) as start, start(0) as servers:
        parameters = begin(servers, 2)
        assert [high - low for low, high in servers.ranges].count(0) == 2
        servers.push(torch.ones(2), weight=1.0)
        assert pulled(servers, 2).tolist() == [-1.0, -1.0]
        assert servers.take_staleness() == {0: 1}
        servers.begin(parameters, torch.optim.SGD(parameters, lr=1.0), rule="collect", state=servers.state())
        out, piggybacked = torch.empty(2), torch.tensor([2.0])
        servers.collect(torch.ones(2), piggybacked, weight=0.5, out=out)
        assert out.tolist() == [-0.5, -0.5]
        assert piggybacked.tolist() == [1.0]


def test_what_lies_in_a_part():
    assert chunks_in([(3, 2), (), (4,)], (2, 9), [True, False, False]) == [
        ParameterChunk(0, 1, 2, (2, 2), 0, True),
        ParameterChunk(1, 0, 1, (), 4, False),
        ParameterChunk(2, 0, 2, (2,), 5, False),
    ]
    assert chunks_in([(3, 2)], (4, 4)) == []
    assert overlap((0, 3), (2, 5)) == (2, 3)
    assert overlap((0, 2), (2, 5)) is None


def test_a_peer_copies_what_it_still_has_to_send_before_it_changes():
    with listen("127.0.0.1") as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        peer = ServerConnection(sender, SECRET, m.decode_from_worker)
        values = torch.ones(5_000_000)
        peer.send(m.Reply(1), [values], may_change=True)
        assert peer.has_more_to_send
        peer.copy_pending()
        values.fill_(2.0)
        received = bytearray()
        receiver.settimeout(LIMIT_S)
        while peer.has_more_to_send:
            received += receiver.recv(2**20)
            peer.flush()
        sender.close()
        while data := receiver.recv(2**20):
            received += data
    assert torch.equal(torch.frombuffer(received[-values.nbytes :], dtype=torch.float32), torch.ones(5_000_000))
