"""The first question: what is exchanged? Answers as data; nothing is moved here."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.algorithms.outer import OuterOptimiser, average

__all__ = ["Gradients", "Updates", "What"]


@dataclass(frozen=True)
class Gradients:
    """Gradients, before the optimiser steps: all workers apply the same one."""


@dataclass(frozen=True)
class Updates:
    """Each worker steps by itself; what it changed since the last exchange is combined by an outer optimiser."""

    outer: OuterOptimiser = field(default_factory=average)
    optimizer_state: bool = False
    """Whether the optimisers' own state (momentum, say) is averaged, too."""


What = Gradients | Updates
