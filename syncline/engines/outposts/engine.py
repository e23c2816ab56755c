"""The driver's end of outposts: an engine whose processes are wherever outposts are.

Here: `OutpostEngine`, which lets outposts in, passes on what the coordinator wants, and notices when one is gone. A
thread of its own speaks to them, so that they hear from the driver also while it is busy. Not here: who keeps which
place (`roster.py`), and how outposts come to be (`engines/ray.py`, `spark.py`, `attach.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from syncline.comms.control import RunFiles, Ticket
from syncline.comms.curve import Keys, Router
from syncline.comms.segment import machine_here
from syncline.engines.engine import Exit
from syncline.engines.network import Host, Network
from syncline.engines.outposts.files import TASK, checkpoints_wanted, pieces_of, put, remove
from syncline.engines.outposts.messages import (
    PROTOCOL,
    Accepted,
    Alive,
    Blind,
    Ended,
    Enrol,
    FromOutpost,
    Invitation,
    Kill,
    Launch,
    Leave,
    Piece,
    Place,
    Refused,
    Removed,
    ToOutpost,
    decode_from_outpost,
    encode,
)
from syncline.engines.outposts.place import not_alike, place_here
from syncline.engines.outposts.roster import Roster, Start
from syncline.errors import ConfigError, SynclineError
from syncline.plan.machine import Machine

__all__ = ["OutpostEngine"]

_ALIVE_S = 1.0
_SILENCE_S = 15.0
"""After so long without a word an outpost is gone, even if no kernel has said so."""
_FAREWELL_S = 12.0
_TOKEN_BYTES = 32
_UNNAMED_S = 10.0
"""For so long a connection to the lifelines' port may keep silent about who it is."""
_MOST_UNNAMED = 64
_TICK_S = 0.25


class OutpostEngine:
    """An `Engine` of outposts that come to `host`. A subclass brings them there, in `_summon`."""

    def __init__(
        self, host: str, *, port: int | None = None, secret: str | None = None, limit_s: float = 300.0
    ) -> None:
        """Listen for outposts at `host` and `port`; a free port and a new secret if none is given.

        They must come within `limit_s`.
        """
        self._host, self._limit_s = host, limit_s
        self._secret = secret or secrets.token_hex(32)
        try:
            self._router = Router(host, Keys.of(self._secret.encode()), port)
        except zmq.ZMQError as error:
            raise ConfigError(f"Nobody can be waited for at {host}:{port}: {error.strerror or error}.") from None
        self._lifelines = socket.create_server((host, 0))
        self.invitation = Invitation(address=self._router.address.removeprefix("tcp://"), secret=self._secret)
        """What an outpost needs to come here."""
        self._ours, self._machine = place_here(host).versions, machine_here()
        self._lock = threading.RLock()
        self._roster = Roster()
        self._places: dict[str, Place] = {}
        self._heard_at: dict[str, float] = {}
        self._tokens: dict[bytes, str] = {}
        self._wanted_seats: dict[str, int | None] = {}
        self._lifeline_of: dict[socket.socket, str] = {}
        self._unnamed: dict[socket.socket, float] = {}  # since when, the longest first
        self._tickets: dict[tuple[int, int], tuple[Ticket, str]] = {}
        self._exits: deque[Exit] = deque()
        self._refusals: list[str] = []
        self._network: Network | None = None
        self._seen: Path | None = None
        self._files: RunFiles | None = None
        self._blind: dict[str, bool] = {}  # who does not see our files, and whether it has the task
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._news, self._changes = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3))
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="syncline-outposts", daemon=True)
        self._thread.start()

    # For engines

    def _summon(self, count: int) -> None:
        """Have so many outposts come. Does not wait for them."""

    def _trouble(self) -> str | None:
        """Why no outpost will come any more, if that is so."""
        return None

    def _dismiss(self) -> None:
        """All outposts were told to leave: end what brought them."""

    def _told_waiting(self, have: int, want: int) -> str:
        """What the user reads while outposts are waited for."""
        return f"Waiting for {want - have} of {want} places for workers."

    def _lost(self, seat: int, reason: str) -> None:
        """Who brought the outpost of this seat says that it is gone; perhaps no connection has told that yet."""
        with self._lock:
            for outpost in self._roster.given(seat):
                self._lose(outpost, reason)

    # The engine protocol

    def gather(self, workers: int, tell: Callable[[str], None]) -> None:
        """Wait until there is a place for each worker; then, and not before, `network` and `machine` are known."""
        if self._network is not None:
            return
        self._summon(workers)
        deadline, said, told = time.monotonic() + self._limit_s, -1, 0
        while not self._fix(workers):
            with self._lock:
                have, refusals = len(self._roster.machines), self._refusals[told:]
            for reason in refusals:
                tell(reason)
            told += len(refusals)
            if have != said:
                tell(self._told_waiting(have, workers))
                said = have
            if (trouble := self._trouble()) is not None:
                raise SynclineError(trouble)
            if time.monotonic() > deadline:
                self._give_up(have, workers)
            self._await_change(_TICK_S)

    def _fix(self, workers: int) -> bool:
        with self._lock:
            if len(self._roster.machines) < workers:
                return False
            self._roster.fix(workers)
            names = _names({o: p for o, p in self._places.items() if o in self._roster.machines})
            kept = [o for o in self._roster.seats if o is not None]
            self._network = Network(self._host, tuple(Host(names[o], self._places[o].address) for o in kept))
            return True

    @property
    def network(self) -> Network:
        """Where the processes are, and where they find the coordinator."""
        assert self._network is not None, "`gather` comes first"
        return self._network

    @property
    def machine(self) -> Machine:
        """What the places offer together, as the planner wants to know it."""
        with self._lock:
            places = [self._places[o] for o in self._roster.seats if o is not None]
        one_of_each = {p.machine: p for p in places}.values()
        first = places[0]
        reason = first.no_shared_memory_because
        if len(one_of_each) == 1 and first.machine != self._machine:
            reason = "they are on another host than the driver"
        return replace(
            Machine.here(),
            host=first.host,
            cores=sum(p.cores for p in one_of_each),
            memory_available_bytes=min(p.memory_available_bytes for p in one_of_each),
            no_shared_memory_because=reason,
        )

    def provide(self, files: RunFiles) -> None:
        """Sent to outposts that do not see them."""
        self._files = files

    def launch(self, ticket: Ticket, log: Path) -> None:
        """Start a worker at its outpost, as soon as that is here."""
        log.parent.mkdir(parents=True, exist_ok=True)
        if self._seen is None:
            self._seen = log.parent.resolve() / f".seen-{secrets.token_hex(8)}"
            self._seen.touch()
        with self._lock:
            self._tickets[ticket.rank, ticket.life] = ticket, str(log.resolve())
            self._start(self._roster.launch(ticket.rank, ticket.life, time.monotonic()))

    def poll(self) -> list[Exit]:
        """The workers that have ended since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        found = []
        while self._exits:
            found.append(self._exits.popleft())
        return found

    def kill(self, rank: int | None = None) -> None:
        """End all workers now, or one."""
        with self._lock:
            if rank is None:
                for outpost in self._roster.machines:
                    self._send(outpost, Kill(None))
            elif (outpost_of := self._roster.where(rank)) is not None:
                self._send(outpost_of, Kill(rank))
            else:
                self._report(self._roster.give_up(rank))

    def close(self) -> None:
        """Send all outposts away, and wait until they have gone."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            for outpost in self._roster.machines:
                self._send(outpost, Leave())
        deadline = time.monotonic() + _FAREWELL_S
        while self._roster.machines and (left_s := deadline - time.monotonic()) > 0:
            self._await_change(left_s)
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._dismiss()
        if self._seen is not None:
            self._seen.unlink(missing_ok=True)
        for fd in (self._wake, self._news, self._changes):
            os.close(fd)

    def fileno(self) -> int:
        """Readable when a worker has ended."""
        return self._news

    # Who comes and who leaves, from any thread to the one that waits for it

    def _tell_change(self) -> None:
        os.eventfd_write(self._changes, 1)

    def _await_change(self, limit_s: float) -> None:
        """Return after a change since the last call.

        Not by a Condition: Ctrl-C between its letting go of the lock and its wait has it say only that the lock
        is not held.
        """
        select.select([self._changes], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changes)

    # The thread that speaks to outposts

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._lifelines, selectors.EVENT_READ, self._take_lifeline)
            selector.register(self._wake, selectors.EVENT_READ, self._do_orders)
            selector.register(int(self._router.socket.getsockopt(zmq.FD)), selectors.EVENT_READ, lambda _: None)
            self._selector = selector
            speaks_at = 0.0
            while not self._is_closing:
                for key, _ in selector.select(_TICK_S):
                    key.data(key.fileobj)
                self._do_orders(None)
                self._hear_all()
                if (now := time.monotonic()) >= speaks_at:
                    speaks_at = now + _ALIVE_S
                    self._tick(now)
            self._do_orders(None)
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
        self._router.close()

    def _do_orders(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _hear_all(self) -> None:
        # ZeroMQ's descriptor tells only that there may be something; all must be taken each time.
        while (received := self._router.receive()) is not None:
            identity, data = received
            # Neither what makes no sense nor a disk that is full is a reason to leave the others alone.
            with contextlib.suppress(msgspec.DecodeError, RecursionError, ValueError, OSError):
                self._hear(identity.decode(), decode_from_outpost(data))

    def _hear(self, outpost: str, message: FromOutpost) -> None:
        with self._lock:
            self._heard_at[outpost] = time.monotonic()
            if isinstance(message, Enrol):
                self._let_in(outpost, message)
            elif isinstance(message, Ended) and self._roster.ended(message.rank, message.life):
                self._tickets.pop((message.rank, message.life), None)
                self._report([Exit(message.rank, message.pid, message.code, message.signal, message.life)])
            elif isinstance(message, Blind) and (message.rank, message.life) in self._tickets:
                self._blind.setdefault(outpost, False)
                self._start([Start(outpost, message.rank, message.life)])
            elif isinstance(message, Piece) and self._files is not None:
                put(Path(self._files.run_dir), message)
            elif isinstance(message, Removed) and self._files is not None:
                remove(Path(self._files.run_dir), message.name)

    def _let_in(self, outpost: str, message: Enrol) -> None:
        if message.protocol != PROTOCOL:
            reason: str | None = f"{message.place.host} has another version of Syncline than the driver."
        else:
            reason = not_alike(message.place, self._ours)
        if reason is not None:
            self._refusals.append(reason)
            self._send(outpost, Refused(reason))
        else:
            token = secrets.token_bytes(_TOKEN_BYTES)
            self._tokens[token] = outpost
            self._places[outpost] = message.place
            self._wanted_seats[outpost] = message.seat
            host, port = self._lifelines.getsockname()[:2]
            self._send(outpost, Accepted(f"{host}:{port}", token))
        self._tell_change()

    def _take_lifeline(self, _: object) -> None:
        with contextlib.suppress(OSError):
            connection, _address = self._lifelines.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, self._read_lifeline)
            self._unnamed[connection] = time.monotonic()
            if len(self._unnamed) > _MOST_UNNAMED:
                self._hang_up(next(iter(self._unnamed)))

    def _read_lifeline(self, connection: socket.socket) -> None:
        """Who is new says who it is; who is known says nothing until its end."""
        try:
            said = connection.recv(_TOKEN_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        with self._lock:
            outpost = self._tokens.pop(said, None) if said else self._lifeline_of.pop(connection, None)
            self._unnamed.pop(connection, None)
            if said and outpost is not None:
                self._lifeline_of[connection] = outpost
                place = self._places[outpost]
                self._start(self._roster.enrol(outpost, place.machine, self._wanted_seats.pop(outpost, None)))
                self._tell_change()
            else:
                self._hang_up(connection)
                if outpost is not None:
                    self._lose(outpost, f"was lost with its place on {self._places[outpost].host}")

    def _hang_up(self, connection: socket.socket) -> None:
        self._unnamed.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _tick(self, now: float) -> None:
        for stranger in [c for c, since in self._unnamed.items() if now - since > _UNNAMED_S]:
            self._hang_up(stranger)
        with self._lock:
            for outpost in list(self._roster.machines):
                if now - self._heard_at.get(outpost, now) > _SILENCE_S:
                    host = self._places[outpost].host
                    self._lose(outpost, f"was lost with {host}, which was not heard for {_SILENCE_S:g} s")
                else:
                    self._send_now(outpost, Alive())
            exits, starts = self._roster.tick(now)
            self._report(exits)
            self._start(starts)

    def _lose(self, outpost: str, reason: str) -> None:
        exits, starts = self._roster.gone(outpost, reason, time.monotonic())
        self._report(exits)
        self._start(starts)
        self._tell_change()

    # Both threads, with the lock

    def _start(self, starts: list[Start]) -> None:
        for start in starts:
            ticket, log = self._tickets[start.rank, start.life]
            place = self._places[start.outpost]
            ticket = msgspec.structs.replace(ticket, host=place.address, is_elsewhere=place.machine != self._machine)
            if start.outpost in self._blind:
                self._send_files(start.outpost)
                ticket = msgspec.structs.replace(ticket, files=self._files)
            self._send(start.outpost, Launch(ticket, log, None if start.outpost in self._blind else str(self._seen)))

    def _send_files(self, outpost: str) -> None:
        """What a worker needs there: the task, once, and the newest checkpoint, which others may have written since."""
        assert self._files is not None, "`provide` comes before the first launch"
        wanted = [(file, f"checkpoints/{file.name}") for file in checkpoints_wanted(self._files)]
        if not self._blind[outpost]:
            self._blind[outpost] = True
            wanted.insert(0, (Path(self._files.payload_path), TASK))
        for file, name in wanted:
            for piece in pieces_of(file, name):
                self._send(outpost, piece)

    def _report(self, exits: list[Exit]) -> None:
        self._exits.extend(exits)
        if exits:
            os.eventfd_write(self._news, 1)

    def _send(self, outpost: str, message: ToOutpost) -> None:
        self._orders.put(lambda: self._send_now(outpost, message))
        os.eventfd_write(self._wake, 1)

    def _send_now(self, outpost: str, message: ToOutpost) -> None:
        self._router.send(outpost.encode(), encode(message))

    def _give_up(self, have: int, want: int) -> NoReturn:
        refused = f" Refused: {self._refusals[-1]}" if self._refusals else ""
        raise SynclineError(
            f"Only {have} of {want} places for workers came within {self._limit_s:g} s.{refused} Ask for fewer "
            "--workers, or give the cluster more room."
        )


def _names(places: dict[str, Place]) -> dict[str, str]:
    """A name for each outpost's machine: the same for the same machine, and others for others."""
    by_machine: dict[str, str] = {}
    for place in places.values():
        if place.machine not in by_machine:
            taken = [n for n in by_machine.values() if n == place.host or n.startswith(f"{place.host}-")]
            by_machine[place.machine] = place.host if not taken else f"{place.host}-{len(taken) + 1}"
    return {outpost: by_machine[place.machine] for outpost, place in places.items()}
