"""A small network inside this machine: network namespaces connected by a switch, with links that can be cut.

Here: `Namespaces`, which creates and removes it. Not here: running workers in it (`engines/local.py`), and cutting
links at a given step of a run (`lab/chaos/links.py`). It needs Linux, root and the command `ip`.

    driver 10.x.y.1 --+--[switch]--+-- 10.x.y.2  namespace 0: lo and eth0, nothing else
    on this host      |            +-- 10.x.y.3  namespace 1
                      |            `-- ...

The switch is a bridge in its own namespace, so that this host's firewall does not filter its traffic. A link is cut by
removing its port from the bridge: both ends keep their carrier, addresses and routes, and connections stay open, so
neither end is notified. Taking an interface down would be visible at its other end at once.

With a delay, the switch is a process (`slow_switch.py`), since not every kernel has `netem`, and the ports are TAP
devices. The process ends with this one.

The namespaces have no names, only descriptors, and the kernel removes them with the last process that holds one. So
there is nothing to clean up, however this process ends. To inspect the namespace of a process:
`nsenter --net --target PID ip addr`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from syncline.engines.network import Host, Network
from syncline.errors import ConfigError, SynclineError
from syncline.lab.slow_switch import mac_of

Done = TypeVar("Done")

_MOST = 100
_LONGEST_DELAY_S = 5.0
_TAP_MTU = 60_000
"""Large frames, so that the switch process can forward a gigabit per second."""
_NEW_NETWORK = 0x40000000
_COMMAND_S = 10.0
_REACH_S = 3.0
_SUBNETS = tuple(map(ipaddress.IPv4Network, ("10.64.0.0/10", "172.16.0.0/12", "198.18.0.0/15")))
"""Where subnets are taken from: private ranges, and last the range reserved for benchmarking network devices."""
_numbers = itertools.count()


class Namespaces:
    """`count` network namespaces, until `close` or the end of a `with`. Engines take `network`.

    `rate` (as in `limit`) applies to each direction of each link, `delay_s` from any host to any other, including the
    driver's.
    """

    def __init__(self, count: int, *, rate: str | None = None, delay_s: float = 0.0) -> None:
        if not 1 <= count <= _MOST:
            raise ConfigError(f"Cannot create {count} network namespaces: it must be 1 to {_MOST}.", count=count)
        if shutil.which("ip") is None:
            raise ConfigError("Network namespaces need the command ip, which is not installed. Install iproute2.")
        self._link = f"sl{os.getpid()}-{next(_numbers)}"
        if not 0 <= delay_s <= _LONGEST_DELAY_S:
            raise ConfigError(f"A delay of {delay_s:g} s is not possible: it must be 0 to {_LONGEST_DELAY_S:g} s.")
        bytes_per_s = read_rate(rate) if rate is not None else None
        self._descriptors: list[int] = []
        self._slow: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
        self.close: Callable[[], object] = weakref.finalize(self, _remove, self._link, self._descriptors, self._slow)
        """Remove everything; also called when this object is garbage-collected."""
        try:
            self._make(count, delay_s)
            if bytes_per_s is not None:
                assert rate is not None
                self._limit_driver(rate)
                for number in range(count):
                    self.limit(number, rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def inside(self, number: int, do: Callable[[], Done]) -> Done:
        """The result of `do`, called in this namespace in a separate thread."""
        return _inside(self._descriptors[1 + number], do)

    def number_of(self, process: int) -> int:
        """The namespace in which an engine runs this process."""
        return self.network.hosts.index(self.network.host_of(process))

    def cut(self, number: int) -> None:
        """Drop all packets between this namespace and the others or the driver, without notifying either end."""
        if self._slow:
            self._command_switch(port=1 + number, cut=True)
            return
        _ip(self._switch, [f"link set {self._port(number)} nomaster"])

    def heal(self, number: int) -> None:
        """Restore the link; does nothing if it is up."""
        if self._slow:
            self._command_switch(port=1 + number, cut=False)
            return
        _ip(self._switch, [f"link set {self._port(number)} master switch"])

    def limit(self, number: int, rate: str) -> None:
        """Limit each direction of the link to a rate in `tc`'s notation: `100mbit`."""
        if self._slow:
            self._command_switch(port=1 + number, rate=read_rate(rate))
            return
        for namespace, interface in ((self._switch, self._port(number)), (self._descriptors[1 + number], "eth0")):
            _shape(namespace, interface, rate)

    def _limit_driver(self, rate: str) -> None:
        if self._slow:
            self._command_switch(port=0, rate=read_rate(rate))
            return
        for namespace, interface in ((self._switch, "driver"), (None, self._link)):
            _shape(namespace, interface, rate)

    def _make(self, count: int, delay_s: float) -> None:
        for _ in range(1 + count):
            self._descriptors.append(_inside(None, _new_namespace))
        self._switch, *hosts = self._descriptors
        subnet = free_subnet(_taken(), os.getpid())
        driver, *addresses = map(str, itertools.islice(subnet.hosts(), 1 + count))
        if delay_s:
            self._join_by_process(driver, list(zip(hosts, addresses, strict=True)), delay_s)
        else:
            self._join_by_bridge(driver, list(zip(hosts, addresses, strict=True)))
        for host in hosts:
            _check_reach(host, driver)
        self.network = Network(
            driver,
            tuple(
                Host(f"namespace-{number}", address, host)
                for number, (host, address) in enumerate(zip(hosts, addresses, strict=True))
            ),
        )

    def _join_by_bridge(self, driver: str, hosts: list[tuple[int, str]]) -> None:
        switch = f"/proc/{os.getpid()}/fd/{self._switch}"
        # Without a fixed address, the bridge would change its own whenever a port leaves it.
        commands = [
            "link add switch address 02:00:00:00:00:01 type bridge",
            "link set switch up",
        ]
        _ip(self._switch, commands)
        _ip(None, _end_of_link(self._link, driver, "driver", switch))
        for number, (host, address) in enumerate(hosts):
            _ip(host, ["link set lo up", *_end_of_link("eth0", address, f"port{number}", switch)])
        ports = ["driver", *map(self._port, range(len(hosts)))]
        _ip(self._switch, [f"link set {port} addrgenmode none master switch up" for port in ports])

    def _join_by_process(self, driver: str, hosts: list[tuple[int, str]], delay_s: float) -> None:
        taps = [_inside(None, lambda: _tap(self._link))]
        try:
            _ip(None, _end_of_tap(self._link, driver, 0))
            for number, (host, address) in enumerate(hosts):
                taps.append(_inside(host, lambda: _tap("eth0")))
                _ip(host, ["link set lo up", *_end_of_tap("eth0", address, 1 + number)])
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "syncline.lab.slow_switch", *map(str, (theirs.fileno(), *taps))],
                    pass_fds=[theirs.fileno(), *taps],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the owner of the network
                )
            self._slow.append((ours, process))
        finally:
            for tap in taps:
                os.close(tap)
        self._command_switch(delay=delay_s)

    def _command_switch(self, **command: float | bool) -> None:
        """Send a command and wait for its completion."""
        ((connection, _),) = self._slow
        connection.settimeout(_COMMAND_S)
        connection.sendall(json.dumps(command).encode() + b"\n")
        if connection.recv(16) != b"done\n":
            raise SynclineError("The switch process has exited; its error is above.")

    @staticmethod
    def _port(number: int) -> str:
        return f"port{number}"


def why_not_possible() -> str | None:
    """Why namespaces cannot be created here; None if they can."""
    try:
        Namespaces(1).close()
    except SynclineError as error:
        return str(error)
    return None


def free_subnet(taken: Iterable[ipaddress.IPv4Network], seed: int) -> ipaddress.IPv4Network:
    """A subnet for 254 addresses that overlaps none of those taken; different seeds rarely choose the same one.

    >>> free_subnet([ipaddress.IPv4Network("10.64.0.0/24")], 0)
    IPv4Network('10.64.1.0/24')
    """
    taken = list(taken)
    for block in _SUBNETS:
        count = block.num_addresses // 256
        for number in range(count):
            subnet = ipaddress.IPv4Network((int(block[0]) + 256 * ((seed + number) % count), 24))
            if not any(subnet.overlaps(each) for each in taken):
                return subnet
    raise SynclineError("This host has routes to all private networks, so none is left for namespaces.")


def _taken() -> list[ipaddress.IPv4Network]:
    """Networks in which this host has addresses or to which it has routes, except the default route."""
    routes = json.loads(_run(None, ["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]")
    return [ipaddress.IPv4Network(r["dst"], strict=False) for r in routes if r["dst"] not in ("default", "0.0.0.0/0")]


def read_rate(text: str) -> float:
    """A rate in `tc`'s notation, in bytes per second.

    >>> read_rate("1gbit"), read_rate("80 kbit")
    (125000000.0, 10000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(k|m|g)?bit", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"Cannot parse the rate {text!r}. Write it as 1gbit, 100mbit or 64kbit.", text=text)
    return float(found[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


def _shape(namespace: int | None, interface: str, rate: str) -> None:
    shape = f"qdisc replace dev {interface} root tbf rate {rate.replace(' ', '')} burst 256kb latency 50ms"
    _run(namespace, ["tc", *shape.split()])


def _tap(name: str) -> int:
    """A TAP device in this thread's namespace; whole frames sent to it can be read here."""
    set_interface, tap, without_header = 0x400454CA, 0x0002, 0x1000
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, set_interface, struct.pack("16sH22x", name.encode(), tap | without_header))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _end_of_tap(name: str, address: str, port: int) -> list[str]:
    """Commands that configure a TAP device as the interface with this address."""
    return [
        f"link set {name} addrgenmode none address {mac_of(port)} mtu {_TAP_MTU}",
        f"addr add {address}/24 dev {name}",
        f"link set {name} up",
    ]


def _end_of_link(name: str, address: str, port: str, switch: str) -> list[str]:
    """Commands that create a link from here to a port of the switch."""
    return [
        f"link add {name} type veth peer name {port} netns {switch}",
        f"link set {name} addrgenmode none",  # a single address, so that the choice is unambiguous
        f"addr add {address}/24 dev {name}",
        f"link set {name} up",
    ]


def _check_reach(namespace: int, driver: str) -> None:
    """Report a blocking firewall now, and not as workers that time out waiting for the coordinator."""
    with socket.create_server((driver, 0)) as listener:
        try:
            _inside(namespace, lambda: socket.create_connection(listener.getsockname(), timeout=_REACH_S).close())
        except OSError as error:
            raise SynclineError(
                f"A network namespace cannot reach this host at {driver} ({error}). A firewall may block it: let it "
                "accept traffic from interfaces whose names begin with sl."
            ) from error


def _remove(link: str, descriptors: list[int], slow: list[tuple[socket.socket, subprocess.Popen[bytes]]]) -> None:
    """Remove the link on this host; the kernel removes the rest with the last process in it."""
    while slow:
        connection, switch = slow.pop()
        connection.close()
        switch.kill()
        switch.wait()
    subprocess.run(["ip", "link", "delete", link], capture_output=True, timeout=_COMMAND_S, check=False)
    while descriptors:
        os.close(descriptors.pop())


def _new_namespace() -> int:
    try:
        _call("unshare", _NEW_NETWORK)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise SynclineError(f"This system cannot create network namespaces: {error.strerror}.") from error
        user = "root lacks them here" if os.geteuid() == 0 else f"this is user {os.geteuid()}"
        raise ConfigError(
            f"Network namespaces need root with the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN, and {user}. Run it "
            "with sudo, in a container that has them, or without namespaces."
        ) from error


def _ip(namespace: int | None, commands: list[str]) -> None:
    _run(namespace, ["ip", "-batch", "-"], "\n".join(commands))


def _run(namespace: int | None, command: list[str], text: str = "") -> str:
    """The output of a command in a namespace, or on this host."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False)

    try:
        done = _inside(namespace, run)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SynclineError(f"Cannot run '{' '.join(command)}': {error}.") from error
    if done.returncode:
        what = "; ".join([" ".join(command), *text.splitlines()])
        raise SynclineError(f"Cannot configure the network: {done.stderr.strip()}, after: {what}.")
    return done.stdout


def _inside(namespace: int | None, do: Callable[[], Done]) -> Done:
    """Call `do` in a thread that enters the namespace and never leaves it, so that nothing has to be undone."""
    results: list[Done] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if namespace is not None:
                _call("setns", namespace, _NEW_NETWORK)
            results.append(do())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="syncline-namespace", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
