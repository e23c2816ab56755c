"""The third question: with whom? Answers as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Everyone", "Whom"]


@dataclass(frozen=True)
class Everyone:
    """With all other workers at once: an all-reduce."""


Whom = Everyone
