"""How much memory this worker takes: its peak while training, and what a micro-batch of some size needs.

Here: reading and resetting the peak, and the trial steps before the first real one, which all workers take together
and which leave nothing behind: no update, no statistics, no gradients, no random numbers drawn. Not here: what follows
from them (`plan/memory.py`), and computing less at a time (`compute.py`) or some of it twice (`recompute.py`).
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.errors import ConfigError
from syncline.plan.memory import MemoryUse, fitted, largest
from syncline.workers.compute import leaving_nothing_behind

__all__ = ["Peak", "agreed_use", "measure_use", "needed_besides", "optimizer_slots"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FEWEST_SAMPLES = 2  # batch normalisation needs as many
_ENOUGH_SAMPLES = 8  # however small a share is, so that the trials show how memory grows
_LONGEST_S = 5.0
"""No larger trial after one that took so long."""


class Peak:
    """The most memory that this process, or its GPU, has had in use since the last `reset`, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Count from now on. Where the system does not allow it, the count goes on from the start of the process."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            _CLEAR.write_text("5")  # the number by which Linux knows this wish; see proc(5)

    def read(self) -> int:
        """On a CPU this is resident memory: the program, its data, and the shared memory that it has touched."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError):
            found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
            if found:
                return int(found[1]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def agreed_use(collective: Collective, mine: MemoryUse | None, measure: Callable[[], MemoryUse]) -> MemoryUse:
    """What a worker of this View needs, as those know who were there before, or as all of them `measure` it now."""
    known = [use for use in _told(collective, mine) if use is not None]
    if not known:
        known = [use for use in _told(collective, measure()) if use is not None]
    return largest(known)


def measure_use(
    step: Callable[[int], None],
    model: nn.Module,
    *,
    share: int,
    batch: int,
    limit_bytes: int,
    more: int,
    collective: Collective,
    device: torch.device,
) -> MemoryUse:
    """What forward and backward need, from trials with 2, 4, 8... samples, up to the `share` of a batch or the limit.

    `step(samples)` is such a trial, `more` what training needs on top of it. A trial of a model with global batch norm
    needs everybody, so all workers take the same ones.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"memory_limit is set, but nobody tells how much memory {device.type} takes. Leave it out.")
    peak, peaks = Peak(device), list[tuple[int, int]]()
    samples, most_samples = min(_FEWEST_SAMPLES, batch), min(max(share, _ENOUGH_SAMPLES), batch)
    with leaving_nothing_behind(model, device):
        step(samples)  # what is loaded and allocated once is so now
        while True:
            peak.reset()
            start = time.perf_counter()
            step(samples)
            seconds = time.perf_counter() - start
            peaks.append((samples, peak.read()))
            doubled = min(2 * samples, most_samples)
            use = fitted(peaks, more)
            is_near = len(peaks) > 1 and (use.at(doubled) > limit_bytes or seconds > _LONGEST_S)
            is_enough = doubled == samples or is_near
            if b"enough" in collective.gather(b"enough" if is_enough else b""):
                peak.reset()
                return use
            samples = doubled


def needed_besides(model: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective) -> int:
    """What training needs and trial steps do not: the optimiser's state, the others' gradients, a checkpoint's copy."""
    weights = sum(p.nbytes for p in model.parameters())
    slots = optimizer_slots(optimizer)
    is_on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    to_come = 0 if optimizer.state else slots
    return weights * (to_come + (collective.size > 1) + (1 + slots) * is_on_cpu)


def optimizer_slots(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers the optimiser keeps for each parameter."""
    settings = optimizer.param_groups[0]
    if "betas" in settings:
        return 2
    return 1 if settings.get("momentum") or "lr_decay" in settings else 0


def _told(collective: Collective, mine: MemoryUse | None) -> list[MemoryUse | None]:
    told = collective.gather(msgspec.msgpack.encode(mine))
    return [msgspec.msgpack.decode(data, type=MemoryUse | None) for data in told]
