"""How a contract reports a broken promise.

Here: `Promises`, assertions that name what is under test. Not here: the promises themselves (`*_contract.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Promises:
    """Assertions about an implementation; `subject` names its kind, such as "This Collective"."""

    subject: str

    def require(self, kept: bool, broken: str) -> None:
        if not kept:
            raise AssertionError(f"{self.subject} breaks the contract: {broken}.")

    def require_equal(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if torch.equal(found, expected):
            return
        wrong = (found != expected).flatten()
        where = int(wrong.nonzero()[0])
        self.require(
            False,
            f"{what} has {int(wrong.sum())} wrong numbers of {wrong.numel()}; number {where} is "
            f"{found.flatten()[where].item()} and should be {expected.flatten()[where].item()}",
        )

    @contextmanager
    def expecting(self, kind: type[Exception], what: str) -> Iterator[None]:
        """A block that must raise an error of this kind."""
        try:
            yield
        except kind:
            return
        self.require(False, f"{what} did not raise {kind.__name__}")
