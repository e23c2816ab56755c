"""Where a run is in the order of its samples.

Here: `Position`, one global cursor. Not here: the order itself (`order.py`), and who does what (`stint.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """Where a run is: `cursor` samples of `epoch` are done, after `step` steps in all.

    `extra` of the steps made up for others whose effect was lost with a worker; the order did not advance in them.
    """

    epoch: int = 0
    cursor: int = 0
    step: int = 0
    extra: int = 0

    def after(self, samples: int, count: int) -> Position:
        """The position when `samples` more of `count` are done; a finished epoch is the start of the next."""
        cursor = self.cursor + samples
        return (
            Position(self.epoch + 1, 0, self.step + 1, self.extra)
            if cursor >= count
            else Position(self.epoch, cursor, self.step + 1, self.extra)
        )

    def made_up(self) -> Position:
        """The position after a step that made up for an earlier one."""
        return Position(self.epoch, self.cursor, self.step + 1, self.extra + 1)
