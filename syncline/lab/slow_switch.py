"""A network switch in user space: forwards frames with a delay and a rate limit.

Here: `EmulatedLink`, which computes when a frame arrives (pure), and the program that forwards frames, started by
`lab/namespaces.py` as `python -m syncline.lab.slow_switch CONTROL TAP...` with their descriptors. It is for kernels
without `netem`. Ports are TAP devices: the kernel passes them whole frames with checksums, of up to 64 KB, so that a
Python process keeps up with a gigabit.

    host --[rate]--> switch --[rate]--> host        half of the delay on each link, in each direction

Forwarding is cut-through: two links of the same rate take no longer than one, unless the second one is busy.

The owner sends commands on CONTROL, one JSON object per line: {"port": 2, "cut": true}, {"port": 2, "rate": 125e6} in
bytes per second, {"delay": 0.001} in seconds from host to host. The switch exits when its owner does.
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

_LARGEST_FRAME = 65_600
_QUEUE_S = 0.5
"""Frames that would wait longer are dropped, as by the full queue of a real switch."""


@dataclass
class EmulatedLink:
    """One direction of a link: frames leave one after the other."""

    rate: float | None = None
    """Bytes per second; None: unlimited."""
    is_cut: bool = False
    busy_until: float = 0.0

    def send(self, size: int, now: float) -> float | None:
        """When a frame sent now has left the link; None if it is dropped.

        >>> link = EmulatedLink(rate=1000)
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
    """The MAC address behind a port; fixed, so that no address has to be learned."""
    return f"02:00:00:00:01:{port:02x}"


class _Switch:
    def __init__(self, control: socket.socket, taps: list[int]) -> None:
        self._control, self._taps = control, taps
        self._up = [EmulatedLink() for _ in taps]
        self._down = [EmulatedLink() for _ in taps]
        self._delay = 0.0
        self._in_flight: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._port_of = {bytes.fromhex(mac_of(k).replace(":", "")): k for k in range(len(taps))}
        self._unread = b""

    def run(self) -> None:
        """Forward frames until the owner exits."""
        number = {tap: port for port, tap in enumerate(self._taps)}
        while True:
            wait = max(0.0, self._in_flight[0][0] - time.monotonic()) if self._in_flight else None
            ready, _, _ = select.select([self._control.fileno(), *self._taps], [], [], wait)
            if self._control.fileno() in ready and not self._execute():
                return
            for tap in ready:
                if tap in number:
                    self._receive(number[tap], tap)
            self._deliver()

    def _execute(self) -> bool:
        data = self._control.recv(65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            self._delay = command.get("delay", self._delay)
            for link in (self._up[command["port"]], self._down[command["port"]]) if "port" in command else ():
                link.is_cut = command.get("cut", link.is_cut)
                link.rate = command.get("rate", link.rate)
            self._control.sendall(b"done\n")
        return bool(data)

    def _receive(self, port: int, tap: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(tap, _LARGEST_FRAME)
                now = time.monotonic()
                left = self._up[port].send(len(frame), now)
                if left is None:
                    continue
                to = self._port_of.get(frame[:6])
                all_others = [k for k in range(len(self._taps)) if k != port]
                for target in all_others if to is None else [to]:
                    began = left - len(frame) / rate if (rate := self._up[port].rate) is not None else left
                    arrives = self._down[target].send(len(frame), began + self._delay / 2)
                    if arrives is not None:
                        due = arrives + self._delay / 2
                        heapq.heappush(self._in_flight, (due, next(self._count), target, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._in_flight)
            with contextlib.suppress(OSError):  # the queue is full, or the interface is down
                os.write(self._taps[target], frame)


if __name__ == "__main__":
    _Switch(socket.socket(fileno=int(sys.argv[1])), [int(text) for text in sys.argv[2:]]).run()
