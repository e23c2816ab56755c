"""Messages between single ranks of a collective: arrays that only one other rank needs.

Here: `Messages`, for all transports. Ranks of one host send through its memory (`channel.py`) and need not wait for
each other; over a network they swap messages in the same call (`ProcessGroup.swap`). Not here: what is sent to whom.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from syncline.comms.channel import TensorChannel
from syncline.comms.collective import Collective
from syncline.comms.process_group import ProcessGroup
from syncline.comms.shared_memory import SharedMemory

_SLOTS = 16
_LEAST_SLOT_BYTES = 4096
_IN_FLIGHT = 2
"""How many of the largest messages fit into a channel, so that two ranks may send to each other before they receive."""
_LENGTHS = struct.Struct("<q")


class Messages:
    """This rank's messages to and from other ranks; all ranks open them together, with the same arguments.

    `routes` are the pairs (source, target) that may send, `most_bytes` is how large a message gets.
    """

    def __init__(self, collective: Collective, routes: Sequence[tuple[int, int]], most_bytes: int) -> None:
        self._rank = collective.rank
        self._group = collective if isinstance(collective, ProcessGroup) else None
        self._channels: dict[tuple[int, int], TensorChannel] = {}
        self.bytes_sent = 0
        if isinstance(collective, SharedMemory) and routes:
            slot_bytes = max(_LEAST_SLOT_BYTES, _IN_FLIGHT * (most_bytes + 1024) // (_SLOTS - _IN_FLIGHT) + 1)
            self._channels = collective.open_channels(routes, slots=_SLOTS, slot_bytes=slot_bytes)

    @property
    def waited_s(self) -> float:
        return sum(channel.waited_s for channel in self._channels.values())

    def swap(self, outgoing: Mapping[int, Sequence[np.ndarray]], sources: Sequence[int]) -> dict[int, list[np.ndarray]]:
        """Send these arrays to each rank, and receive those of the `sources`, flat and as bytes.

        A rank that is sent something must call this, too, with this one among its sources.
        """
        packed = {peer: [_as_bytes(array) for array in arrays] for peer, arrays in outgoing.items()}
        self.bytes_sent += sum(part.nbytes for parts in packed.values() for part in parts)
        if self._group is not None:
            joined = {peer: _joined(parts) for peer, parts in packed.items()}
            return {peer: _split(data) for peer, data in self._group.swap(joined, sources).items()}
        for peer, parts in packed.items():
            self._channels[self._rank, peer].send([torch.from_numpy(part) for part in parts])
        return {peer: self._received(peer) for peer in sources}

    def send(self, peer: int, arrays: Sequence[np.ndarray]) -> None:
        """Send to a rank of this host without waiting for it, as long as it receives now and then."""
        parts = [_as_bytes(array) for array in arrays]
        self.bytes_sent += sum(part.nbytes for part in parts)
        self._channels[self._rank, peer].send([torch.from_numpy(part) for part in parts])

    def receive(self, peer: int) -> list[np.ndarray]:
        """The next message of a rank of this host; waits for it."""
        return self._received(peer)

    def has_message(self, peer: int) -> bool:
        """Whether a message of a rank of this host has arrived."""
        return self._channels[peer, self._rank].has_message

    def _received(self, peer: int) -> list[np.ndarray]:
        return [part.numpy() for part in self._channels[peer, self._rank].receive() if part is not None]


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    lengths = b"".join(_LENGTHS.pack(part.nbytes) for part in parts)
    return np.concatenate([np.frombuffer(_LENGTHS.pack(len(parts)) + lengths, np.uint8), *parts])


def _split(data: np.ndarray) -> list[np.ndarray]:
    memory = memoryview(data)  # type: ignore[arg-type]  # NumPy's types do not say that an array has a buffer
    count = _LENGTHS.unpack_from(memory, 0)[0]
    start = _LENGTHS.size * (count + 1)
    made = []
    for number in range(count):
        length = _LENGTHS.unpack_from(memory, _LENGTHS.size * (number + 1))[0]
        made.append(data[start : start + length].copy())
        start += length
    return made
