"""Many connections to ports of this machine, from a process of its own: `python flood.py SETTINGS_AS_JSON`.

Here: the flood, with nothing but the standard library, so that it starts in an instant. It says what came of it and
keeps its connections until its input is closed. Not here: what should become of them (`test_strangers.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER: a closed connection leaves nothing behind that would use up the ports
MOST_HELD = 20_000
SOURCES = 8  # addresses to connect from: with many connections from one, the kernel is slow to find a free port
IP_BIND_ADDRESS_NO_PORT = 24  # Linux; the socket module has it from Python 3.12 on
PATIENCE_S = 0.02  # a port on this machine answers at once, unless it has too many connections to accept
SPEECH = [b"", b"", b"\0" * 8, b"\xff\0\0\0\0\0\0\0\1\x7f", b"GET / HTTP/1.1\r\n\r\n"]


def pour(ports: list[int], count: int, per_second: float, limit_s: float) -> dict[str, dict[str, int]]:
    """`count` connections to each port, of which the latest `MOST_HELD` stay open; what came of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = MOST_HELD if most == resource.RLIM_INFINITY else min(MOST_HELD, most - 100)
    held: deque[socket.socket] = deque()
    outcomes = {port: Counter[str]() for port in ports}
    silences = dict.fromkeys(ports, 0)  # how many in a row were not answered
    began = time.monotonic()
    for number, port in itertools.product(range(count), ports):
        due = began + number / per_second
        if (now := time.monotonic()) > began + limit_s:
            outcomes[port]["not tried"] += 1
            continue
        if now < due:
            time.sleep(due - now)
        if len(held) >= room:
            held.popleft().close()
        stranger = socket.socket()
        stranger.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        stranger.bind((f"127.0.0.{2 + number % SOURCES}", 0))
        held.append(stranger)
        outcome = attempt(stranger, port, SPEECH[number % len(SPEECH)], PATIENCE_S if silences[port] < 10 else 0.0)
        silences[port] = silences[port] + 1 if outcome == "unanswered" else 0
        outcomes[port][outcome] += 1
    return {str(port): dict(outcomes[port]) for port in ports}


def attempt(stranger: socket.socket, port: int, says: bytes, waits_s: float) -> str:
    stranger.setblocking(False)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(BlockingIOError):
        try:
            stranger.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            return "refused"
    poll = select.poll()
    poll.register(stranger, select.POLLOUT)
    if not poll.poll(waits_s * 1000):
        return "unanswered"
    with contextlib.suppress(OSError):  # it hung up at once
        stranger.send(says)
    return "connected"


@contextlib.contextmanager
def flood(ports: list[int], count: int, *, per_second: float = 1e9, limit_s: float = 90.0) -> Iterator[Flood]:
    """A flood that lasts as long as the context."""
    settings = {"ports": ports, "count": count, "per_second": per_second, "limit_s": limit_s}
    with subprocess.Popen(
        [sys.executable, "-S", str(Path(__file__)), json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield Flood(process)
        finally:
            process.kill()


class Flood:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def outcomes(self) -> dict[int, dict[str, int]]:
        """How many attempts were connected, refused or unanswered, by port, once all were made."""
        assert self._process.stdout is not None
        found: dict[str, dict[str, int]] = json.loads(self._process.stdout.readline())
        return {int(port): outcomes for port, outcomes in found.items()}

    @property
    def is_over(self) -> bool:
        """Whether all connections were tried; then `outcomes` returns at once."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(pour(**settings)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
