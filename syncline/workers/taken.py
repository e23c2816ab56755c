"""The batches of a round: which of them the script computes with, and which it has taken ahead.

Here: `TakenBatches`, a part of a `LoopRound`. Not here: how it shows which batch a script computes with
(`own_loop/in_use.py`).

Most loops compute with a batch before they take the next. Some take it in the middle of a step, so that it is loaded
meanwhile:

    loss = model(x)
    x = next(batches)     # taken ahead: the gradients to come are not those of this batch
    loss.backward()
    optimizer.step()

An update commits the batches in use. Those taken ahead are carried into the next round.
"""

from __future__ import annotations

from syncline.data.order import Share


class TakenBatches:
    """The batches that a script has taken, and that no update has committed yet."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.used = 0
        """How many of them are in use; the others were taken ahead."""
        self.is_computed = False
        """Whether a model has computed with those in use."""
        self.has_backward = False
        """Whether gradients were computed since."""

    def __len__(self) -> int:
        return len(self.shares)

    @property
    def in_use(self) -> list[Share]:
        return self.shares[: self.used]

    @property
    def ahead(self) -> list[Share]:
        return self.shares[self.used :]

    def take(self, share: Share) -> None:
        """The script takes a batch; until `use`, it is ahead."""
        self.shares.append(share)

    def use(self) -> None:
        """The script computes with all batches that it has taken."""
        self.used, self.is_computed, self.has_backward = len(self.shares), False, False

    def commit(self) -> list[Share]:
        """An update has committed the batches in use; these are they."""
        return self.drop(self.used)

    def drop(self, count: int) -> list[Share]:
        """The first `count` batches, which are removed."""
        dropped, self.shares = self.shares[:count], self.shares[count:]
        self.used = max(0, self.used - count)
        if not self.used:
            self.is_computed = self.has_backward = False
        return dropped

    def clear(self) -> None:
        self.drop(len(self.shares))
