"""Dividing an evaluation among the workers.

Here: `Division`, a pure rule: which worker evaluates which part of which batch, and again after failures. The number of
batches need not be known. Not here: reading them (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence


class Division:
    """Each batch has as many parts as there were workers at first, and each part has an owner.

    `earlier` is the division before some of its owners had `gone`. With them everything is gone that they have
    evaluated, in any pass: their parts have other owners in this one.
    """

    def __init__(
        self, members: Sequence[int], earlier: Division | None = None, gone: frozenset[int] = frozenset()
    ) -> None:
        self._members, self._earlier, self._gone = tuple(members), earlier, gone
        self.parts: int = len(members) if earlier is None else earlier.parts

    def owner_of(self, batch: int, part: int) -> int:
        """The worker_id whose results include this part, in the end."""
        owner = self._members[part] if self._earlier is None else self._earlier.owner_of(batch, part)
        return self._members[(batch * self.parts + part) % len(self._members)] if owner in self._gone else owner

    def is_due(self, batch: int, part: int, worker_id: int) -> bool:
        """Whether this worker evaluates this part in this pass."""
        is_new = self._earlier is None or self._earlier.owner_of(batch, part) in self._gone
        return is_new and self.owner_of(batch, part) == worker_id

    def after_failures(self, members: Sequence[int]) -> Division | None:
        """The division for another pass if only `members` have completed this one; None if all have."""
        gone = frozenset(self._members) - frozenset(members)
        return Division(members, self, gone) if gone else None
