"""The outpost itself: what runs where somebody else has started a process for us.

Here: `keep_outpost`. It calls the driver, and does what it says with workers of its own (`engines/local.py`). Not here:
the driver's end (`engine.py`), and how this process came to be (`ray.py`, `spark.py`, `cli/worker.py`).

When the driver is gone, workers are asked to save and stop, as on the driver's own machine. When this process is
killed, they are ended at once: the driver goes on without them and starts others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from syncline.comms.control import RunFiles
from syncline.comms.curve import Dealer, Keys
from syncline.engines.local import LocalEngine
from syncline.engines.network import Host, Network
from syncline.engines.outposts.files import TASK, Copy
from syncline.engines.outposts.messages import (
    PROTOCOL,
    Accepted,
    Alive,
    Blind,
    Ended,
    Enrol,
    Invitation,
    Kill,
    Launch,
    Leave,
    Piece,
    Refused,
    ToOutpost,
    decode_to_outpost,
    encode,
)
from syncline.engines.outposts.place import place_here
from syncline.errors import SynclineError

__all__ = ["keep_outpost"]

_ALIVE_S = 1.0
_SILENCE_S = 30.0
"""After so long without a word the driver is gone, even if its kernel has not said so: a network may be cut."""
_LIFELINE_S = 10.0


def keep_outpost(
    invitation: Invitation,
    *,
    seat: int | None = None,
    address: str | None = None,
    patience_s: float = 60.0,
    should_leave: Callable[[], bool] = lambda: False,
) -> str:
    """Keep a place for workers until the run is over; why it ended is returned. `SynclineError` if it is not let in.

    `seat` is the place to keep, if this process was given one of several; `address` is where others reach this machine,
    if it is not the one on the way to the driver. The driver may come `patience_s` later than this process.
    """
    driver = invitation.address.rpartition(":")[0].strip("[]")
    place = place_here(driver, address)
    engine = LocalEngine(Network(driver, (Host(place.host, place.address),)), ends_at_once=True)
    keys = Keys.of(invitation.secret.encode())
    name = f"{place.host}-{os.getpid()}-{secrets.token_hex(4)}"
    with (
        closing(engine),
        closing(
            Dealer(
                f"tcp://{invitation.address}",
                name.encode(),
                keys.server_public,
                keys.client_public,
                keys.client_secret,
            )
        ) as channel,
    ):
        channel.send(encode(Enrol(PROTOCOL, name, place, seat)))
        accepted = _wait_for_answer(channel, invitation.address, patience_s, should_leave)
        with _lifeline(accepted) as lifeline:
            return _Outpost(channel, lifeline, engine, Copy(engine.scratch)).keep(should_leave)


class _Outpost:
    def __init__(self, channel: Dealer, lifeline: socket.socket, engine: LocalEngine, copy: Copy) -> None:
        self._channel, self._lifeline, self._engine, self._copy = channel, lifeline, engine, copy

    def keep(self, should_leave: Callable[[], bool]) -> str:
        heard_at, speaks_at = time.monotonic(), 0.0
        while True:
            data = self._channel.receive(_ALIVE_S / 2, self._engine.fileno(), self._lifeline.fileno())
            now = time.monotonic()
            if data is not None:
                heard_at, message = now, decode_to_outpost(data)
                if isinstance(message, Leave):
                    return "the run is over"
                self._obey(message)
            exits = self._engine.poll()
            for news in self._copy.news():  # before the end of who wrote it is told
                self._channel.send(encode(news))
            for exit in exits:
                self._channel.send(encode(Ended(exit.rank, exit.life, exit.pid, exit.code, exit.signal)))
            if _is_cut(self._lifeline):
                return "the driver is gone"
            if now - heard_at > _SILENCE_S:
                return f"the driver was not heard for {_SILENCE_S:g} s"
            if should_leave():
                return "it was asked to leave"
            if now >= speaks_at:
                speaks_at = now + _ALIVE_S
                self._channel.send(encode(Alive()))

    def _obey(self, message: ToOutpost) -> None:
        if isinstance(message, Launch):
            ticket, log = message.ticket, Path(message.log)
            if message.seen is None:
                ticket = msgspec.structs.replace(ticket, files=self._files_here(ticket.files))
                log = self._copy.folder / "logs" / log.name
            elif not Path(message.seen).exists():
                self._channel.send(encode(Blind(ticket.rank, ticket.life)))
                return
            self._engine.launch(ticket, log)
        elif isinstance(message, Piece):
            self._copy.put(message)
        elif isinstance(message, Kill):
            self._engine.kill(message.rank)

    def _files_here(self, there: RunFiles | None) -> RunFiles:
        """In the copy."""
        folder = self._copy.folder
        begins_at = there.checkpoint_path if there is not None else None
        return RunFiles(
            payload_path=str(folder / TASK),
            run_dir=str(folder),
            checkpoint_path=str(folder / "checkpoints" / Path(begins_at).name) if begins_at else None,
        )


def _wait_for_answer(channel: Dealer, address: str, patience_s: float, should_leave: Callable[[], bool]) -> Accepted:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not should_leave():
        data = channel.receive(0.2)
        if data is None:
            continue
        with contextlib.suppress(msgspec.DecodeError):
            message = decode_to_outpost(data)
            if isinstance(message, Refused):
                raise SynclineError(message.reason)
            if isinstance(message, Accepted):
                return message
    raise SynclineError(
        f"No run answered at {address} within {patience_s:g} s. Is it running, is the address one that can be reached "
        "from here, and is the secret the one that it showed?"
    )


@contextlib.contextmanager
def _lifeline(accepted: Accepted) -> Iterator[socket.socket]:
    host, _, port = accepted.lifeline.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_LIFELINE_S) as connection:
        connection.sendall(accepted.token)
        connection.setblocking(False)
        yield connection


def _is_cut(lifeline: socket.socket) -> bool:
    try:
        return lifeline.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
