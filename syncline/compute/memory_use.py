"""Into how many micro-batches a worker must divide its share to stay within a memory limit.

Here: `MemoryUse`, the result of measuring, and pure functions of it. Not here: measuring and agreeing with the other
workers (`compute/memory.py`).

Memory grows with the samples s of a micro-batch as fixed + s * per sample: activations grow with the samples, weights
and all else do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError, plural

_SPARE = 0.1
"""The fraction of the limit that is left free: allocators do not return every page at once."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory that a worker needs in a step, in bytes."""

    fixed: int
    per_sample: float

    def at(self, samples: int) -> int:
        """The memory for a micro-batch of `samples`."""
        return round(self.fixed + self.per_sample * samples)


@dataclass(frozen=True)
class Pieces:
    """How a share is divided into micro-batches."""

    count: int
    samples: int
    """In the largest micro-batch."""
    expected_bytes: int
    limit_bytes: int

    def describe(self) -> str:
        pieces = plural(self.count, "piece")
        memory = f"about {self.expected_bytes / 1e6:,.0f} of {self.limit_bytes / 1e6:,.0f} MB"
        return f"micro-batches of {self.samples}: {pieces} per step, {memory}"


def fit_use(peaks: Sequence[tuple[int, int]], more: int = 0) -> MemoryUse:
    """Fit a line to the peaks of trial steps, (samples, bytes); `more` is what training needs on top of them.

    Between two trials of few samples the peak may not rise at all, because freed memory is reused. So the slope is the
    steeper one of first to last and second-to-last to last, and the line lies above all peaks.
    """
    most, last = peaks[-1]
    slopes = [(last - peak) / (most - samples) for samples, peak in (peaks[0], *peaks[-2:-1]) if samples < most]
    slope = max([0.0, *slopes])
    return MemoryUse(fixed=more + round(max(peak - slope * samples for samples, peak in peaks)), per_sample=slope)


def largest_use(uses: Sequence[MemoryUse]) -> MemoryUse:
    """Enough for each of them."""
    return MemoryUse(max(use.fixed for use in uses), max(use.per_sample for use in uses))


def pieces_within(limit_bytes: int, use: MemoryUse, samples: int, at_least: int = 1) -> Pieces:
    """The smallest number of micro-batches, but `at_least`, with which a share of `samples` stays within the limit.

    `ConfigError` if a single sample exceeds it.
    """
    room = (1 - _SPARE) * limit_bytes - use.fixed
    most = samples if use.per_sample * samples <= room else int(room // use.per_sample) if room > 0 else 0
    if most < 1:
        raise ConfigError(
            f"memory_limit is {limit_bytes / 1e6:,.0f} MB, but a worker needs about "
            f"{use.at(1) / (1 - _SPARE) / 1e6:,.0f} MB with one sample at a time: {use.fixed / 1e6:,.0f} MB for "
            f"program, weights, gradients and optimizer, and {use.per_sample / 1e6:,.1f} MB for a sample. Set a larger "
            "--memory-limit, add --checkpoint-activations, divide the model among workers with --layout auto, or use a "
            "smaller model.",
            code="memory-limit",
            limit_bytes=limit_bytes,
            needed_bytes=round(use.at(1) / (1 - _SPARE)),
        )
    count = min(max(-(-samples // most), at_least), samples)
    in_one = -(-samples // count)
    return Pieces(count, in_one, use.at(in_one), limit_bytes)
