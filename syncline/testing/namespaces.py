"""A small network inside this machine: network namespaces that are joined by a switch, and links that can be cut.

Here: `Namespaces`, which makes one and takes it away again. Not here: putting workers into it (`engines/local.py`), and
cutting links at a given step of a run (`chaos/links.py`). Linux, root and the command `ip` are needed.

    driver 10.x.y.1 --+--[switch]--+-- 10.x.y.2  namespace 0: lo and eth0, nothing else
    on this host      |            +-- 10.x.y.3  namespace 1
                      |            `-- ...

The switch is a bridge in a namespace of its own, so that this host's firewall has no say in what crosses it. A link is
cut by taking its port off the bridge: both ends keep their carrier, addresses and routes, and connections stay open, so
nobody is told. Taking an interface down would be seen at its other end at once.

The namespaces have no names, only descriptors, and the kernel removes them with the last process that holds one. So
nothing is left behind, however this process ends, and there is never anything to clean up. To look into the one of a
process: `nsenter --net --target PID ip addr`.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from syncline.engines.network import Host, Network
from syncline.errors import ConfigError, SynclineError

__all__ = ["Namespaces", "free_subnet", "why_not_possible"]

Done = TypeVar("Done")

_MOST = 100
_NEW_NETWORK = 0x40000000
_COMMAND_S = 10.0
_REACH_S = 3.0
_ROOM = tuple(map(ipaddress.IPv4Network, ("10.64.0.0/10", "172.16.0.0/12", "198.18.0.0/15")))
"""Where subnets are taken from: private ones, and at last those reserved for measuring network devices."""
_numbers = itertools.count()


class Namespaces:
    """`count` network namespaces; `network` tells an engine how to use them. For `with`, or until `close`."""

    def __init__(self, count: int) -> None:
        if not 1 <= count <= _MOST:
            raise ConfigError(f"{count} network namespaces cannot be made: it must be 1 to {_MOST}.")
        if shutil.which("ip") is None:
            raise ConfigError("Network namespaces need the command ip, which is not there. Install iproute2.")
        self._link = f"sl{os.getpid()}-{next(_numbers)}"
        self._descriptors: list[int] = []
        self.close: Callable[[], object] = weakref.finalize(self, _remove, self._link, self._descriptors)
        """Take everything away; also done when nobody holds this object any more."""
        try:
            self._make(count)
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
        """What `do` gives when it is called in this namespace, in a thread of its own."""
        return _inside(self._descriptors[1 + number], do)

    def number_of(self, process: int) -> int:
        """The namespace in which an engine puts this process of a run."""
        return self.network.hosts.index(self.network.host_of(process))

    def cut(self, number: int) -> None:
        """From now on nothing gets from this namespace to another or to the driver, nor back, and nobody is told."""
        _ip(self._switch, [f"link set {self._port(number)} nomaster"])

    def heal(self, number: int) -> None:
        """What is sent arrives again, also to and from a namespace that was not cut off."""
        _ip(self._switch, [f"link set {self._port(number)} master switch"])

    def limit(self, number: int, rate: str) -> None:
        """So much and no more gets through the link, each way: `100mbit`, as `tc` writes it."""
        for namespace, interface in ((self._switch, self._port(number)), (self._descriptors[1 + number], "eth0")):
            shape = f"qdisc replace dev {interface} root tbf rate {rate} burst 256kb latency 50ms"
            _run(namespace, ["tc", *shape.split()])

    def _make(self, count: int) -> None:
        for _ in range(1 + count):
            self._descriptors.append(_inside(None, _new_namespace))
        self._switch, *hosts = self._descriptors
        subnet = free_subnet(_taken(), os.getpid())
        driver, *addresses = map(str, itertools.islice(subnet.hosts(), 1 + count))
        switch = f"/proc/{os.getpid()}/fd/{self._switch}"
        # Without an address of its own, the bridge would take another whenever a port leaves it.
        orders = [
            "link add switch address 02:00:00:00:00:01 type bridge",
            "link set switch up",
        ]
        _ip(self._switch, orders)
        _ip(None, _end_of_link(self._link, driver, "driver", switch))
        for number, (host, address) in enumerate(zip(hosts, addresses, strict=True)):
            _ip(host, ["link set lo up", *_end_of_link("eth0", address, f"port{number}", switch)])
        ports = ["driver", *map(self._port, range(count))]
        _ip(self._switch, [f"link set {port} addrgenmode none master switch up" for port in ports])
        for host in hosts:
            _check_reach(host, driver)
        self.network = Network(
            driver,
            tuple(
                Host(f"namespace-{number}", address, host)
                for number, (host, address) in enumerate(zip(hosts, addresses, strict=True))
            ),
        )

    @staticmethod
    def _port(number: int) -> str:
        return f"port{number}"


def why_not_possible() -> str | None:
    """Why there can be no namespaces here, in words; None if there can."""
    try:
        Namespaces(1).close()
    except SynclineError as error:
        return str(error)
    return None


def free_subnet(taken: Iterable[ipaddress.IPv4Network], seed: int) -> ipaddress.IPv4Network:
    """A subnet with room for 254 addresses that has none of those taken; processes with different seeds rarely meet.

    >>> free_subnet([ipaddress.IPv4Network("10.64.0.0/24")], 0)
    IPv4Network('10.64.1.0/24')
    """
    taken = list(taken)
    for room in _ROOM:
        count = room.num_addresses // 256
        for number in range(count):
            subnet = ipaddress.IPv4Network((int(room[0]) + 256 * ((seed + number) % count), 24))
            if not any(subnet.overlaps(each) for each in taken):
                return subnet
    raise SynclineError("There is no private network left that this host has no route to.")


def _taken() -> list[ipaddress.IPv4Network]:
    """What this host has addresses in or routes to, but for the way to everywhere."""
    routes = json.loads(_run(None, ["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]")
    return [ipaddress.IPv4Network(r["dst"], strict=False) for r in routes if r["dst"] not in ("default", "0.0.0.0/0")]


def _end_of_link(name: str, address: str, port: str, switch: str) -> list[str]:
    """Orders to make a link from here to a port of the switch."""
    return [
        f"link add {name} type veth peer name {port} netns {switch}",
        f"link set {name} addrgenmode none",  # one address is enough, and nobody has to guess which to take
        f"addr add {address}/24 dev {name}",
        f"link set {name} up",
    ]


def _check_reach(namespace: int, driver: str) -> None:
    """A firewall that lets nothing in should be heard of now, and not from workers that wait for the coordinator."""
    with socket.create_server((driver, 0)) as listener:
        try:
            _inside(namespace, lambda: socket.create_connection(listener.getsockname(), timeout=_REACH_S).close())
        except OSError as error:
            raise SynclineError(
                f"Nothing gets from a network namespace to this host at {driver} ({error}). A firewall may be in the "
                "way: let it accept what comes in from interfaces whose names begin with sl."
            ) from error


def _remove(link: str, descriptors: list[int]) -> None:
    """The link on this host at once; the rest goes with the last process in it."""
    subprocess.run(["ip", "link", "delete", link], capture_output=True, timeout=_COMMAND_S, check=False)
    while descriptors:
        os.close(descriptors.pop())


def _new_namespace() -> int:
    try:
        _call("unshare", _NEW_NETWORK)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise SynclineError(f"This system makes no network namespaces: {error.strerror}.") from error
        who = "root here may not make them" if os.geteuid() == 0 else f"this is user {os.geteuid()}"
        raise ConfigError(
            f"Network namespaces need root, with the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN, and {who}. Run it "
            "with sudo, or in a container that has them, or without namespaces."
        ) from error


def _ip(namespace: int | None, orders: list[str]) -> None:
    _run(namespace, ["ip", "-batch", "-"], "\n".join(orders))


def _run(namespace: int | None, command: list[str], text: str = "") -> str:
    """What a command says in a namespace, or on this host."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False)

    try:
        done = _inside(namespace, run)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SynclineError(f"'{' '.join(command)}' could not be run: {error}.") from error
    if done.returncode:
        what = "; ".join([" ".join(command), *text.splitlines()])
        raise SynclineError(f"The network could not be changed: {done.stderr.strip()}, after: {what}.")
    return done.stdout


def _inside(namespace: int | None, do: Callable[[], Done]) -> Done:
    """In a thread that enters the namespace for good, so that nothing has to be put back, not even after Ctrl-C."""
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
