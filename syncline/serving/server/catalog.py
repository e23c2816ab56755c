"""What a server serves: models, versions and their roles, as plain data.

Here: `Catalog`, which the supervisor sends to each process as a whole; a process makes it true. Not here: who decides
on the next one (`rollout.py`), and the loaded models (`registry.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Catalog", "Role", "ServedVersion", "Withdrawn"]

Role = Literal["stable", "canary", "shadow", "pinned"]
"""stable answers requests that name no version. A canary answers a share of them. A shadow gets copies of them, and its
answers are compared and dropped. pinned answers only requests that name it."""


class ServedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one model."""

    model: str
    version: str
    path: str
    """The file that is served, a copy that never changes."""
    role: Role = "stable"
    share: float = 0.0
    """The share of requests that a canary answers."""
    source: str = ""
    """The file or the run that it was made of."""
    step: int | None = None
    """The step of the checkpoint, if the source is a run."""

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.version


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is not served any more, and why."""

    model: str
    version: str
    reason: str


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is served."""

    generation: int = 0
    versions: tuple[ServedVersion, ...] = ()
    withdrawn: tuple[Withdrawn, ...] = ()
