"""What an outpost and the driver say to each other.

Here: the messages and how to get in. They are MessagePack over CURVE sockets (`comms/curve.py`) and decode into these
types or not at all. Beside that channel an outpost holds a *lifeline*, a plain TCP connection on which it says once who
it is, and then nothing: when either process ends, however it does, the other's kernel says so at once.
"""

from __future__ import annotations

import msgspec

from syncline.comms.control import Ticket

__all__ = [
    "Accepted", "Alive", "Blind", "Ended", "Enrol", "FromOutpost", "Invitation", "Kill", "Launch", "Leave", "Piece",
    "Place", "Refused", "Removed", "ToOutpost", "decode_from_outpost", "decode_to_outpost", "encode",
]  # fmt: skip

PROTOCOL = 1
"""Raised with every change of these messages."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """All that an outpost needs to find the driver and be let in."""

    address: str
    """host:port"""
    secret: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an outpost is."""

    machine: str
    """The same for processes that share a kernel, processes and network, whatever they are called."""
    host: str
    """Its name, for people."""
    address: str
    """At which the others reach the processes there."""
    cores: int
    memory_available_bytes: int
    no_shared_memory_because: str | None
    versions: dict[str, str]
    """Of what must be the same everywhere."""


class Enrol(msgspec.Struct, frozen=True, tag=True):
    """An outpost is here. `seat`: which one of the places of its engine it keeps, if it was given one."""

    protocol: int
    name: str
    place: Place
    seat: int | None


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Said by both ends every second."""


class Piece(msgspec.Struct, frozen=True, tag=True):
    """A piece of a file of the run, by its name in the run directory; for those who do not see the other's files."""

    name: str
    offset: int
    data: bytes
    is_last: bool


class Removed(msgspec.Struct, frozen=True, tag=True):
    """A file of the run is gone."""

    name: str


class Blind(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot be started yet: the files of the run are not seen here."""

    rank: int
    life: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended."""

    rank: int
    life: int
    pid: int
    code: int | None
    signal: int | None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """You are let in. `token` is what to say on the lifeline."""

    lifeline: str
    token: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """You are not."""

    reason: str


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start a worker. `seen` is a file that who shares the driver's files can see.

    None: the outpost does not, and has been sent what it needs.
    """

    ticket: Ticket
    log: str
    seen: str | None


class Kill(msgspec.Struct, frozen=True, tag=True):
    """End all workers, or one."""

    rank: int | None


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


FromOutpost = Enrol | Alive | Blind | Ended | Piece | Removed
ToOutpost = Accepted | Refused | Piece | Launch | Kill | Alive | Leave

_encoder = msgspec.msgpack.Encoder()
_from_outpost: msgspec.msgpack.Decoder[FromOutpost] = msgspec.msgpack.Decoder(FromOutpost)
_to_outpost: msgspec.msgpack.Decoder[ToOutpost] = msgspec.msgpack.Decoder(ToOutpost)

encode = _encoder.encode
decode_from_outpost = _from_outpost.decode
decode_to_outpost = _to_outpost.decode
