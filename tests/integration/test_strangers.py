"""Strangers at every port of a run: training continues undisturbed, and they learn nothing.

SYNCLINE_TEST_STRANGERS=50000 has that many connect to each port, as `make nightly` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from flood import flood
from real_runs import environment, final_state, same_bits
from under_attack import DESCRIPTORS, number_in, train, write_number
from zmq.utils import z85

from syncline.comms.connection import ClientConnection
from syncline.comms.control import ControlClient, LaunchSpec
from syncline.comms.parameter_server.messages import FromServer, decode_from_server
from syncline.comms.store import connect_store
from syncline.errors import PeerFailed

LIMIT_S = 60.0
STEPS, WORKERS, SERVERS = 60, 2, 1
HALF_OPEN = 300
FLOOD = int(os.environ.get("SYNCLINE_TEST_STRANGERS", "3000"))  # to each port, and more than a process may have open
PER_SECOND = 5000.0
STEP_S = max(0.02, FLOOD / PER_SECOND / STEPS)  # there are steps while the strangers arrive
LONGEST_GREETING = 300  # ZeroMQ's greeting and its half of a handshake, in cipher; our servers' 32 bytes
OPEN_PORTS = {"shared memory": 1, "servers": 1 + SERVERS, "torch.distributed": 2}  # the coordinator's, and others
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
RUNS: dict[str, dict[str, Any]] = {
    "shared memory": {"workers": WORKERS, "max_steps": STEPS},
    "servers": {"strategy": "ssp(bound=0)", "workers": WORKERS, "max_steps": STEPS},
    "torch.distributed": {"collective": "process-group", "workers": WORKERS, "max_steps": STEPS},
}


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first value of `condition` that is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        threading.Event().wait(0.01)
    return value


class Listener(NamedTuple):
    """A listening socket of a run."""

    port: int
    address: str
    """As the kernel writes it."""
    pid: int


@dataclass
class Run:
    """A run under way, in processes of its own."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def steps(self) -> int:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        return number_in(self.folder / "steps")

    @property
    def spec(self) -> LaunchSpec:
        return msgspec.json.decode((self.folder / "launch_spec.json").read_bytes(), type=LaunchSpec)

    @property
    def secret(self) -> bytes:
        return bytes.fromhex((self.folder / "secret").read_text())

    def allow(self, steps: int) -> None:
        write_number(self.folder / "allowed", steps)

    def result(self) -> dict[str, Any]:
        """Let it finish."""
        self.allow(STEPS)
        assert self.process.wait(LIMIT_S) == 0, (self.folder / "log").read_text()
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def descriptors(self) -> dict[int, int]:
        """How many each of its processes has open."""
        found = {}
        for pid in _tree(self.process.pid):
            with contextlib.suppress(OSError):  # a process that has ended
                found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
        return found

    def listeners(self) -> list[Listener]:
        """Of all its processes."""
        found = []
        for pid in _tree(self.process.pid):
            inodes = set()
            with contextlib.suppress(OSError):  # a process that has ended
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
            for table in ("tcp", "tcp6"):
                for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and fields[9] in inodes:
                        address, _, port = fields[1].rpartition(":")
                        found.append(Listener(int(port, 16), address, pid))
        return found


def _tree(root: int) -> list[int]:
    """A process and all that came of it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


@contextlib.contextmanager
def running(folder: Path, kind: str) -> Iterator[Run]:
    """A run that goes no further than it is allowed to."""
    folder.mkdir()
    settings = folder / "settings.json"
    settings.write_text(json.dumps({**RUNS[kind], "seconds": STEP_S}))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("under_attack.py")), str(settings)],
            stdout=log, stderr=log, env=environment(),
        )  # fmt: skip
    try:
        yield Run(process, folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def _descriptors() -> Iterator[None]:
    """Enough for all strangers at once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@dataclass
class Strangers:
    """Connections to one port by those who have no business there, kept until all are counted."""

    port: int
    sockets: list[socket.socket] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)

    def connect(self) -> socket.socket:
        stranger = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        self.sockets.append(stranger)
        return stranger

    def scan(self) -> None:
        """What a port scanner does: connect, and leave; politely and not."""
        for linger in (b"\0\0\0\0\0\0\0\0", b"\1\0\0\0\0\0\0\0") * 10:
            with socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S) as scanner:
                scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def shout(self, data: bytes) -> None:
        """Send something, whether or not all of it is read."""
        stranger = self.connect()
        with contextlib.suppress(OSError):
            stranger.setblocking(False)
            stranger.send(data)

    def close(self) -> list[bytes]:
        """Leave; what each of them has heard."""
        for stranger in self.sockets:
            stranger.setblocking(False)
            data = b""
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                while more := stranger.recv(65536):
                    data += more
            self.heard.append(data)
            stranger.close()
        return self.heard


class Tap:
    """Stands between a worker and a port, and writes down what both say."""

    def __init__(self, port: int) -> None:
        self.said, self.heard = b"", b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._there = port
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(LIMIT_S)

    def _pass_on(self) -> None:
        with (
            self._listener.accept()[0] as here,
            socket.create_connection(("127.0.0.1", self._there)) as there,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(here, selectors.EVENT_READ, there)
            selector.register(there, selectors.EVENT_READ, here)
            while True:
                for key, _ in selector.select():
                    try:
                        data = key.fileobj.recv(65536)  # type: ignore[union-attr]  # they are sockets
                        key.data.sendall(data)
                    except (BrokenPipeError, ConnectionResetError):
                        return
                    if not data:
                        return
                    if key.fileobj is here:
                        self.said += data
                    else:
                        self.heard += data


def shake_hands(spec: LaunchSpec, until_event: int) -> Tap:
    """A client of ZeroMQ tries until something happens; what was said meanwhile."""
    with Tap(port_of(spec)) as tap:
        client = ControlClient(msgspec.structs.replace(spec, worker_id=77, address=f"tcp://127.0.0.1:{tap.port}"))
        client._dealer._socket.linger = 0
        monitor = client._dealer._socket.get_monitor_socket(until_event)
        assert monitor.poll(int(LIMIT_S * 1000)), "ZeroMQ did not answer"
        client._dealer._socket.disable_monitor()
        monitor.close()
        client.close()
    return tap


def port_of(spec: LaunchSpec) -> int:
    return int(spec.address.rpartition(":")[2])


def link_to(port: int, secret: bytes, timeout_s: float) -> ClientConnection[FromServer]:
    return ClientConnection(
        f"127.0.0.1:{port}", secret, decode_from_server, what="Server", timeout_s=timeout_s, should_stop=lambda: False
    )


def recorded(run: Run, listener: Listener, kind: str) -> bytes:
    """What an honest worker says at this port, from the first byte on."""
    if listener.port == port_of(run.spec):
        return shake_hands(run.spec, zmq.EVENT_HANDSHAKE_SUCCEEDED).said
    with Tap(listener.port) as tap:
        if kind == "servers":
            link_to(tap.port, run.secret, LIMIT_S).close()
        else:
            count_visits(run, tap.port, 1)
    return tap.said


def count_visits(run: Run, port: int, more: int) -> int:
    """Have the store of torch.distributed count."""
    store = connect_store("127.0.0.1", port, "strangers", LIMIT_S, run.secret)
    try:
        return store.add("visits", more)
    finally:
        store.close()


def besiege(run: Run, listener: Listener, kind: str) -> Strangers:
    """Everything that can be tried at one port without the secret."""
    generator = random.Random(1)
    strangers = Strangers(listener.port)
    strangers.scan()
    for size in (1, 8, 10, 32, 63, 64, 65, 200, 5000, 100_000):
        strangers.shout(generator.randbytes(size))
        strangers.shout(b"\xff\0\0\0\0\0\0\0\1\x7f" + generator.randbytes(size))  # begins as ZeroMQ does
        strangers.shout(b"\0" * size)
    with pytest.raises(PeerFailed):
        link_to(listener.port, b"wrong" * 7, 0.2)
    if listener.port == port_of(run.spec):
        public, secret = (key.decode() for key in zmq.curve_keypair())
        for wrong in ({"server_key": public}, {"public_key": public, "secret_key": secret}):
            spec = msgspec.structs.replace(run.spec, **wrong)
            strangers.heard.append(shake_hands(spec, zmq.EVENT_DISCONNECTED).heard)
    honest = recorded(run, listener, kind)
    assert len(honest) >= 64
    for _ in range(3):
        strangers.shout(honest)
    for _ in range(HALF_OPEN):
        strangers.connect()
    return strangers


def is_open(listener: Listener) -> bool:
    """Whether it accepts connections; gloo's listeners do not any more."""
    try:
        socket.create_connection(("127.0.0.1", listener.port), timeout=0.5).close()
    except TimeoutError:
        return False
    return True


def undisturbed(folder: Path, kind: str) -> dict[str, Any]:
    folder.mkdir()
    write_number(folder / "allowed", STEPS)
    return train(folder, 0.0, **RUNS[kind])


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    assert found["steps"] == expected["steps"] == STEPS
    assert found["metrics"] == expected["metrics"]
    return same_bits(*(final_state(Path(each["run_dir"]))["model"] for each in (found, expected)))


@pytest.mark.usefixtures("_descriptors")
@pytest.mark.parametrize("kind", ["servers", "torch.distributed"])
def test_training_continues_under_attack_and_strangers_learn_nothing(tmp_path, kind):
    expected = undisturbed(tmp_path / "quiet", kind)
    with running(tmp_path / "besieged", kind) as run:
        run.allow(STEPS - 20)
        until(lambda: run.steps > 2, "the first steps")
        listeners = run.listeners()
        assert {listener.address for listener in listeners} <= LOOPBACK
        ours = [each for each in listeners if is_open(each)]
        assert len(ours) == OPEN_PORTS[kind], listeners
        stores = [each.port for each in ours if kind != "servers" and each.port != port_of(run.spec)]
        siege = [besiege(run, each, kind) for each in ours]
        run.allow(STEPS - 10)
        until(lambda: run.steps == STEPS - 10, "ten steps more, under siege")
        for port in stores:
            assert count_visits(run, port, 0) == 1, "what was replayed was not obeyed"
        heard = [data for strangers in siege for data in strangers.close()]
        found = run.result()
    assert is_same(found, expected)
    assert len(heard) > HALF_OPEN * len(ours)
    assert max(map(len, heard)) <= LONGEST_GREETING
    everything = b"\n".join(heard)
    for secret in (run.secret, *map(z85.decode, (run.spec.secret_key, run.spec.public_key, run.spec.server_key))):
        assert not any(form in everything for form in (secret, secret.hex().encode(), z85.encode(secret)))


@pytest.mark.parametrize("kind", RUNS)
def test_more_connections_than_a_process_may_have_open_change_nothing(tmp_path, kind):
    expected = undisturbed(tmp_path / "quiet", kind)
    with running(tmp_path / "flooded", kind) as run:
        run.allow(STEPS - 20)
        until(lambda: run.steps > 2, "the first steps")
        listeners, before = run.listeners(), run.descriptors()
        ports = {listener.port: listener.pid for listener in listeners}
        most, began, steps = dict(before), time.monotonic(), run.steps
        with flood(list(ports), FLOOD, per_second=PER_SECOND) as strangers:
            while not strangers.is_over:
                most = {pid: max(most.get(pid, 0), count) for pid, count in run.descriptors().items()}
                threading.Event().wait(0.02)
            outcomes, seconds, steps = strangers.outcomes(), time.monotonic() - began, run.steps - steps
            run.allow(STEPS - 10)
            until(lambda: run.steps == STEPS - 10, "ten steps more, with all strangers there")
            after = run.descriptors()
        found = run.result()
    print({"kind": kind, "outcomes": outcomes, "before": before, "most": most, "seconds": seconds, "steps": steps})
    assert is_same(found, expected)
    assert steps > 0, "training continued meanwhile"
    assert set(after) == set(before), "no process was replaced"
    assert sum(bool(each.get("connected")) for each in outcomes.values()) == OPEN_PORTS[kind]
    assert all(not each.get("not tried") for each in outcomes.values())
    assert max(most.values()) < DESCRIPTORS
    workers = set(before) - {pid for port, pid in ports.items() if outcomes[port].get("connected")}
    assert all(most[pid] < before[pid] + 20 for pid in workers), "gloo has accepted none of them"
