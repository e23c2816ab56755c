"""What this machine offers, read once so that the planner can stay pure."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

from syncline.comms.segment import memory_available, why_not_supported

__all__ = ["Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that a plan depends on."""

    host: str
    cores: int
    memory_available_bytes: int
    no_shared_memory_because: str | None
    processor: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        reason = why_not_supported()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            host=platform.node() or "localhost",
            cores=cores,
            memory_available_bytes=memory_available() if sys.platform == "linux" else 0,
            no_shared_memory_because=reason,
            processor=platform.machine(),
            python=platform.python_version(),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)
