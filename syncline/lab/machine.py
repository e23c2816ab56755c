"""The machine on which figures were measured."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from syncline import __version__


@dataclass(frozen=True, kw_only=True)
class BenchMachine:
    """What a reader needs to judge figures, or to reproduce them."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    syncline: str
    load_at_start: float
    """Load average over the last minute, before measuring."""

    @classmethod
    def here(cls) -> BenchMachine:
        return cls(
            processor=_first_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            torch=_version("torch"),
            syncline=__version__,
            load_at_start=os.getloadavg()[0],
        )

    @property
    def is_busy(self) -> bool:
        """Whether other processes made the times unreliable."""
        return self.load_at_start > 0.5 * self.cores

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[str]:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        lines = [
            f"{self.processor}, {cores}, {self.memory_bytes / 1e9:.0f} GB of memory, {self.system}.",
            f"Syncline {self.syncline}, torch {self.torch}, Python {self.python}.",
        ]
        load = f"The load average at the start was {self.load_at_start:.1f} on {cores}"
        if self.is_busy:
            lines.append(
                f"{load}: other processes were running. Trust the ratios more than the times, and look at the spread."
            )
        else:
            lines.append(f"{load}.")
        return lines


def _first_value(path: Path, key: str) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((v.strip() for k, _, v in (line.partition(":") for line in lines) if k.strip() == key), None)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
