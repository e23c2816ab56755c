"""Where things lie in the control segment of a shared-memory collective. Offsets only; free of torch for the driver.

barrier lines (one per rank, one for abort) | slots (one line per rank) | notice | staging (two halves per rank)
"""

from __future__ import annotations

from syncline.comms.barrier import LINE_BYTES, SharedBarrier

__all__ = ["NOTICE_BYTES", "STAGE_BYTES", "ControlLayout"]

STAGE_BYTES = 256 * 1024
NOTICE_BYTES = 256


class ControlLayout:
    """The offsets for `size` ranks."""

    def __init__(self, size: int) -> None:
        self.slots = SharedBarrier.bytes_needed(size)
        self.notice = self.slots + size * LINE_BYTES
        self.stage = self.notice + NOTICE_BYTES
        self.total_bytes = self.stage + 2 * size * STAGE_BYTES

    def slot(self, rank: int) -> int:
        """A line for what a rank tells the others about its part of a call."""
        return self.slots + rank * LINE_BYTES

    def staging(self, rank: int, half: int) -> int:
        """One of a rank's two staging halves."""
        return self.stage + (2 * rank + half) * STAGE_BYTES
