"""The control segment of a shared-memory collective, as its ranks use it: slots, the notice, the staging areas.

Here: small values and bytes that ranks pass to each other through memory that all of them map. Not here: where things
lie (`ControlLayout` in `segment.py`), tensors in segments of their own (`shared_tensors.py`), and the collective calls
(`shared_memory.py`).

Each rank has two staging areas, used in turn. That saves a barrier per call: a rank writes an area again only after all
ranks have arrived at the call in between, and so have finished reading it.
"""

from __future__ import annotations

import mmap
import struct

import torch

from syncline.comms.barrier import SharedBarrier
from syncline.comms.segment import NOTICE_BYTES, STAGE_BYTES, ControlLayout
from syncline.errors import ConfigError

_SLOT = struct.Struct("<dQ")  # a rank's weight; the length of what it staged
SUMMING = 2**63
"""In place of a length: the rank takes part in a sum."""


class Staging:
    """One rank's access to the control segment in `memory`."""

    def __init__(self, memory: mmap.mmap, barrier: SharedBarrier) -> None:
        self._memory, self._barrier = memory, barrier
        self._rank, self._size = barrier.rank, barrier.size
        self._layout = ControlLayout(self._size)
        self._area = 0

    def write_slot(self, weight: float, length: int) -> None:
        _SLOT.pack_into(self._memory, self._layout.slot(self._rank), weight, length)

    def read_slot(self, rank: int) -> tuple[float, int]:
        weight, length = _SLOT.unpack_from(self._memory, self._layout.slot(rank))
        return weight, length

    # Rank 0 announces the address of a new segment in the notice, or, after a "!", why there is none.
    def write_notice(self, text: str) -> None:
        data = text.encode()[:NOTICE_BYTES].ljust(NOTICE_BYTES, b"\0")
        self._memory[self._layout.notice : self._layout.stage] = data

    def read_notice(self) -> str:
        return self._memory[self._layout.notice : self._layout.stage].rstrip(b"\0").decode(errors="replace")

    def next_area(self) -> int:
        """Switch to the other staging area; all ranks do so together."""
        self._area ^= 1
        return self._area

    def tensor(self, rank: int, area: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """What a rank has staged, as a tensor that shares the memory."""
        offset = self._layout.staging(rank, area)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; takes as many rounds as the longest one needs."""
        self.write_slot(0.0, len(payload))
        self._barrier.wait()
        lengths = [self.read_slot(r)[1] for r in range(self._size)]
        if SUMMING in lengths:
            raise out_of_step(self._rank, lengths.index(SUMMING))
        parts: list[list[bytes]] = [[] for _ in range(self._size)]
        memory = self._memory
        for start in range(0, max(lengths), STAGE_BYTES):
            area = self.next_area()
            mine = payload[start : start + STAGE_BYTES]
            offset = self._layout.staging(self._rank, area)
            memory[offset : offset + len(mine)] = mine
            self._barrier.wait()
            for r, length in enumerate(lengths):
                offset = self._layout.staging(r, area)
                parts[r].append(memory[offset : offset + max(0, min(STAGE_BYTES, length - start))])
        self._barrier.wait()  # the slots may be written again
        return [b"".join(p) for p in parts]


def out_of_step(gathering: int, summing: int) -> ConfigError:
    """The error for ranks that call different operations: a user's script has done something on some of them only."""
    return ConfigError(
        f"Workers are out of step: rank {summing} combines gradients, while rank {gathering} exchanges other values or "
        "has ended its loop. One of them skipped a step that another took, for instance by 'continue' or 'break' on a "
        "condition that only it met. Decide together: if worker.any(condition): break.",
        code="out-of-step",
        summing=summing,
        gathering=gathering,
    )
