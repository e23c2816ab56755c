"""A switch in user space: frames go from port to port after a delay and no faster than a rate.

Here: `Link`, which reckons when a frame arrives (pure), and the program that moves frames, started by
`testing/namespaces.py` as `python -m syncline.testing.slow_switch CONTROL TAP...` with their descriptors. For kernels
without `netem`, which could do it inside. Ports are TAP devices: the kernel gives them whole frames with checksums,
of up to 64 KB, so that a Python process keeps up with a gigabit.

    host --[rate]--> switch --[rate]--> host        half of the delay on each link, both ways apart

A frame goes on as it comes in: two links of the same rate take no longer than one, unless others are on the second.

The owner says on CONTROL, a line of JSON each: {"port": 2, "cut": true}, {"port": 2, "rate": 125000000.0} in bytes a
second, {"delay": 0.001} in seconds from host to host. When the owner is gone, so is the switch.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass

__all__ = ["Link", "mac_of"]

_LARGEST_FRAME = 65_600
_QUEUE_S = 0.5
"""What would have to wait longer for its turn is dropped, as full queues of real switches do."""


@dataclass
class Link:
    """One direction of a cable: frames leave one after the other."""

    rate: float | None = None
    """Bytes a second; None: as fast as you like."""
    is_cut: bool = False
    busy_until: float = 0.0

    def send(self, size: int, now: float) -> float | None:
        """When a frame that is given to the link now has left it; None if it is lost.

        >>> link = Link(rate=1000)
        >>> link.send(500, now=0), link.send(500, now=0), link.send(500, now=9)
        (0.5, 1.0, 9.5)
        """
        start = max(now, self.busy_until)
        if self.is_cut or start - now > _QUEUE_S:
            return None
        if self.rate is None:
            return start
        self.busy_until = start + size / self.rate
        return self.busy_until


def mac_of(port: int) -> str:
    """The hardware address of what is at a port; known beforehand, so that nobody has to learn it."""
    return f"02:00:00:00:01:{port:02x}"


class _Switch:
    def __init__(self, control: socket.socket, taps: list[int]) -> None:
        self._control, self._taps = control, taps
        self._up = [Link() for _ in taps]
        self._down = [Link() for _ in taps]
        self._delay = 0.0
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._port_of = {bytes.fromhex(mac_of(k).replace(":", "")): k for k in range(len(taps))}
        self._heard = b""

    def run(self) -> None:
        """Until the owner is gone."""
        number = {tap: port for port, tap in enumerate(self._taps)}
        while True:
            wait = max(0.0, self._flying[0][0] - time.monotonic()) if self._flying else None
            ready, _, _ = select.select([self._control.fileno(), *self._taps], [], [], wait)
            if self._control.fileno() in ready and not self._obey():
                return
            for tap in ready:
                if tap in number:
                    self._take(number[tap], tap)
            self._deliver()

    def _obey(self) -> bool:
        data = self._control.recv(65536)
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            self._delay = order.get("delay", self._delay)
            for link in (self._up[order["port"]], self._down[order["port"]]) if "port" in order else ():
                link.is_cut = order.get("cut", link.is_cut)
                link.rate = order.get("rate", link.rate)
            self._control.sendall(b"done\n")
        return bool(data)

    def _take(self, port: int, tap: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(tap, _LARGEST_FRAME)
                now = time.monotonic()
                left = self._up[port].send(len(frame), now)
                if left is None:
                    continue
                to = self._port_of.get(frame[:6])
                everybody = [k for k in range(len(self._taps)) if k != port]
                for target in everybody if to is None else [to]:
                    began = left - len(frame) / rate if (rate := self._up[port].rate) is not None else left
                    arrives = self._down[target].send(len(frame), began + self._delay / 2)
                    if arrives is not None:
                        due = arrives + self._delay / 2
                        heapq.heappush(self._flying, (due, next(self._count), target, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._flying)
            with contextlib.suppress(OSError):  # its queue is full, or the interface is down
                os.write(self._taps[target], frame)


if __name__ == "__main__":
    _Switch(socket.socket(fileno=int(sys.argv[1])), [int(text) for text in sys.argv[2:]]).run()
