"""How much memory this worker uses: its peak in training, and what a micro-batch of some size needs.

Here: reading and resetting the peak, and dry runs before the first step. All workers take them together, and they leave
no side effects: no update, no statistics, no gradients, no random numbers drawn. Not here: what follows from them
(`memory_use.py`), and using less memory by recomputing (`recompute.py`).
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from syncline.compute.memory_use import MemoryUse, fit_use, largest_use
from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.comms.collective import Collective

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LARGEST_COPY_BYTES = 16 * 2**20
"""A checkpoint of more is written without a copy in memory (`checkpoint/writer.py`)."""
_FEWEST_SAMPLES = 2  # batch normalization needs two
_ENOUGH_SAMPLES = 8  # even if a share is smaller, so that the trials show how memory grows
_LONGEST_S = 5.0
"""No larger trial follows one that took longer than this."""


class Peak:
    """The peak memory of this process, or of its GPU, since the last `reset`, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.elsewhere: Callable[[], int] = lambda: 0
        """How much of the shared memory that this process has touched counts as other workers'."""

    def reset(self) -> None:
        """Start a new peak. Where the system does not allow that, the peak since the start of the process remains."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            _CLEAR.write_text("5")  # resets the peak resident set size; see proc(5)

    def read(self) -> int:
        """On a CPU, resident memory: the program, its data, and the shared memory that it has touched."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError):
            found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
            if found:
                return max(0, int(found[1]) * 1024 - self.elsewhere())
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def agree_on_use(collective: Collective, mine: MemoryUse | None, measure: Callable[[], MemoryUse]) -> MemoryUse:
    """What a worker of this View needs: as survivors of the last View know, or as all members `measure` it now."""
    known = [use for use in _gather(collective, mine) if use is not None]
    if not known:
        known = [use for use in _gather(collective, measure()) if use is not None]
    return largest_use(known)


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

    `step(samples)` runs a trial, `more` is what training needs on top of it. With global batch norm a trial involves
    all workers, so all of them run the same trials.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"memory_limit is set, but the memory use of {device.type} cannot be measured. Remove memory_limit.",
            code="memory-limit-device",
            device=device.type,
        )
    peak, peaks = Peak(device), list[tuple[int, int]]()
    samples, most_samples = min(_FEWEST_SAMPLES, batch), min(max(share, _ENOUGH_SAMPLES), batch)
    with without_side_effects(model, device):
        step(samples)  # one-time loading and allocation happens here
        while True:
            peak.reset()
            start = time.perf_counter()
            step(samples)
            seconds = time.perf_counter() - start
            peaks.append((samples, peak.read()))
            doubled = min(2 * samples, most_samples)
            use = fit_use(peaks, more)
            is_near = len(peaks) > 1 and (use.at(doubled) > limit_bytes or seconds > _LONGEST_S)
            is_enough = doubled == samples or is_near
            if b"enough" in collective.all_gather(b"enough" if is_enough else b""):
                peak.reset()
                return use
            samples = doubled


def extra_memory(model: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective) -> int:
    """What training needs beyond trial steps: optimizer state, other workers' gradients, a checkpoint's copy."""
    weights = sum(p.nbytes for p in model.parameters())
    slots = optimizer_slots(optimizer)
    is_on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    to_come = 0 if optimizer.state else slots
    copied = min(weights * (1 + slots), LARGEST_COPY_BYTES) if is_on_cpu else 0
    return weights * (to_come + (collective.size > 1)) + copied


def optimizer_slots(optimizer: torch.optim.Optimizer) -> int:
    """How many values the optimizer keeps per parameter."""
    settings = optimizer.param_groups[0]
    if "betas" in settings:
        return 2
    return 1 if settings.get("momentum") or "lr_decay" in settings else 0


def _gather(collective: Collective, mine: MemoryUse | None) -> list[MemoryUse | None]:
    gathered = collective.all_gather(msgspec.msgpack.encode(mine))
    return [msgspec.msgpack.decode(data, type=MemoryUse | None) for data in gathered]


@contextmanager
def without_side_effects(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and random state after the trial passes inside."""
    before = [buffer.detach().clone() for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
