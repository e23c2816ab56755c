"""One-way channels between two processes of a host, through memory that both map.

Here: `TensorChannel`: tensors sent through a ring of slots. The sender does not wait for the receiver until all slots
are full; a message larger than a slot is sent in pieces. Unlike at a barrier (`barrier.py`), only two processes take
part.
Not here: the memory (`SharedMemory.open_channels`), and what is sent (`layouts/stage_runner.py`).

Each side owns one 32-bit counter on its own cache line: how many slots it has written, or read. Other x86 cores see one
core's stores in program order: a process that sees a count sees what was written before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from syncline.comms.barrier import LINE_BYTES, aborted, timed_out
from syncline.comms.futex import Timespec, address_of, sleep_on, wake

_WRITTEN, _READ = 0, 1
_MASK = 2**32 - 1
_SLICE_S = 0.05
"""The longest sleep in one go: how late an abort is noticed, whose sender knows nothing of this channel."""


class _Header(msgspec.Struct, array_like=True):
    """What a message holds: of each tensor its type, its shape, and whether it needs a gradient."""

    tensors: list[tuple[str, list[int], bool] | None]


class TensorChannel:
    """One side of a channel in `memory`, which begins zeroed; `peer` is the other side's rank, for errors."""

    def __init__(
        self,
        memory: memoryview,
        *,
        is_sender: bool,
        slots: int,
        slot_bytes: int,
        peer: int,
        is_over: Callable[[], bool],
        spin_s: float,
        timeout_s: float,
    ) -> None:
        self._slot_bytes, self._slots, self._peer = slot_bytes, slots, peer
        self._is_over, self._spin_s, self._timeout_s = is_over, spin_s, timeout_s
        self._words = memory[: 2 * LINE_BYTES].cast("I")
        first = address_of(memory)
        mine, theirs = (_WRITTEN, _READ) if is_sender else (_READ, _WRITTEN)
        self._mine, self._theirs = mine * LINE_BYTES // 4, theirs * LINE_BYTES // 4
        self._my_address, self._their_address = first + mine * LINE_BYTES, first + theirs * LINE_BYTES
        data = np.frombuffer(memory, dtype=np.uint8)[2 * LINE_BYTES :]
        self._data = [data[n * slot_bytes : (n + 1) * slot_bytes] for n in range(slots)]
        self._count = self._words[self._mine]
        self._slice = Timespec.of(_SLICE_S)
        self.bytes_sent = 0
        self.waited_s = 0.0

    @staticmethod
    def bytes_needed(slots: int, slot_bytes: int) -> int:
        return 2 * LINE_BYTES + slots * slot_bytes

    def send(self, tensors: Sequence[torch.Tensor | None], needs_gradient: Sequence[bool] | None = None) -> None:
        """Send these tensors; `PeerFailed` if the other side fails while all slots are full.

        `needs_gradient` says which of them need a gradient on the other side, by default those that do on this one.
        """
        needed = needs_gradient or [t is not None and t.requires_grad for t in tensors]
        found = [
            None if t is None else (_name(t.dtype), list(t.shape), need)
            for t, need in zip(tensors, needed, strict=True)
        ]
        header = msgspec.msgpack.encode(_Header(found))
        parts = [np.frombuffer(len(header).to_bytes(8, "little") + header, dtype=np.uint8)]
        parts += [_as_bytes(t) for t in tensors if t is not None and t.numel()]
        self._write(parts)
        self.bytes_sent += sum(part.nbytes for part in parts)

    @property
    def has_message(self) -> bool:
        """Whether the next message, or its beginning, is there."""
        return (self._words[self._theirs] - self._count - 1) & _MASK < 2**31

    def receive(self) -> list[torch.Tensor | None]:
        """The tensors of the next message, copied out of the channel; `PeerFailed` if the other side fails before."""
        reader = _Reader(self._next_slot)
        length = int.from_bytes(reader.take(8).tobytes(), "little")
        header = msgspec.msgpack.decode(reader.take(length).tobytes(), type=_Header)
        received: list[torch.Tensor | None] = []
        for described in header.tensors:
            if described is None:
                received.append(None)
                continue
            name, shape, requires_grad = described
            tensor = torch.empty(shape, dtype=getattr(torch, name))
            if tensor.numel():
                reader.fill(_as_bytes(tensor))
            received.append(tensor.requires_grad_(requires_grad))
        self._advance()  # the rest of the last slot is not used
        return received

    def _write(self, parts: Sequence[np.ndarray]) -> None:
        room = 0
        for part in parts:
            at = 0
            while at < part.nbytes:
                if not room:
                    self._await(self._count - self._slots + 1)
                    slot, room = self._data[self._count % self._slots], self._slot_bytes
                taken = min(room, part.nbytes - at)
                start = self._slot_bytes - room
                slot[start : start + taken] = part[at : at + taken]
                at, room = at + taken, room - taken
                if not room:
                    self._advance()
        if room:
            self._advance()

    def _next_slot(self, is_first: bool) -> np.ndarray:
        """The next slot of a message, which ends the use of the one before."""
        if not is_first:
            self._advance()
        self._await(self._count + 1)
        return self._data[self._count % self._slots]

    def _advance(self) -> None:
        self._count = (self._count + 1) & _MASK
        self._words[self._mine] = self._count
        wake(self._my_address)

    def _await(self, count: int) -> None:
        """Wait until the other side's counter has reached `count`."""
        if (self._words[self._theirs] - count) & _MASK < 2**31:
            return
        start = time.monotonic()
        try:
            self._sleep_until(count, start)
        finally:
            self.waited_s += time.monotonic() - start

    def _sleep_until(self, count: int, start: float) -> None:
        while True:
            seen = self._words[self._theirs]
            if (seen - count) & _MASK < 2**31:
                return
            waited_s = time.monotonic() - start
            if waited_s < self._spin_s:
                continue
            if self._is_over():
                raise aborted()
            if waited_s > self._timeout_s:
                raise timed_out(self._peer, self._timeout_s)
            sleep_on(self._their_address, seen, self._slice)


class _Reader:
    """Reads a message that lies in several slots."""

    def __init__(self, next_slot: Callable[[bool], np.ndarray]) -> None:
        self._next_slot = next_slot
        self._rest: np.ndarray | None = None

    def take(self, count: int) -> np.ndarray:
        out = np.empty(count, np.uint8)
        self.fill(out)
        return out

    def fill(self, out: np.ndarray) -> None:
        at = 0
        while at < out.nbytes:
            if self._rest is None or not self._rest.nbytes:
                self._rest = self._next_slot(self._rest is None)
            taken = min(self._rest.nbytes, out.nbytes - at)
            out[at : at + taken] = self._rest[:taken]
            at, self._rest = at + taken, self._rest[taken:]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor, in the order of its elements; without a copy if it is contiguous."""
    array: np.ndarray = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array
