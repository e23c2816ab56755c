"""What the machines of a run offer, read once so that the planner can stay pure."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from syncline.comms.segment import memory_available, why_not_supported


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that a plan depends on."""

    host: str
    cores: int
    memory_available_bytes: int
    no_shared_memory_because: str | None
    processor: str
    python: str
    gpus: int = 0
    """CUDA devices that workers can use."""

    @classmethod
    def here(cls) -> Machine:
        reason = why_not_supported()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            host=platform.node() or "localhost",
            cores=cores,
            memory_available_bytes=memory_available() if sys.platform == "linux" else 0,
            no_shared_memory_because=reason,
            processor=platform.machine(),
            python=platform.python_version(),
            gpus=len(visible_gpus()),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The CUDA devices that torch would use in this process, by index or UUID.

    Asks NVIDIA's driver instead of torch, because importing torch takes the driver process more than a second.
    """
    torch = find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    if not folders or not Path(folders[0], "lib", "libtorch_cuda.so").exists():
        return []  # torch is built for the CPU alone
    present = [str(index) for index in range(_gpus_of_the_driver())]
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not present:
        return present
    # As CUDA reads it: devices after the first invalid one are ignored.
    chosen: list[str] = []
    for name in map(str.strip, allowed.split(",")):
        if name not in present and not name.startswith(("GPU-", "MIG-")):
            break
        chosen.append(name)
    return chosen


def _gpus_of_the_driver() -> int:
    count = ctypes.c_uint(0)
    with contextlib.suppress(OSError, AttributeError):  # no NVIDIA driver is installed
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
    return count.value
