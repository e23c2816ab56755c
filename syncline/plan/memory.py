"""How many pieces a worker's share must be computed in so that its memory stays within a limit.

Here: `MemoryUse`, what was found by measuring, and what follows from it. Pure: same measurements, same decision. Not
here: taking measurements and telling the other workers (`workers/memory.py`).

Memory grows with the samples s of a micro-batch as fixed + s * per sample: activations grow with the samples, weights
and all else do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError

__all__ = ["MemoryUse", "Pieces", "fitted", "largest", "pieces_within"]

_SPARE = 0.1
"""So much of the limit is left free: allocators do not give back every page at once."""


@dataclass(frozen=True)
class MemoryUse:
    """What a worker needs in a step, in bytes."""

    fixed: int
    per_sample: float

    def at(self, samples: int) -> int:
        """With a micro-batch of so many samples."""
        return round(self.fixed + self.per_sample * samples)


@dataclass(frozen=True)
class Pieces:
    """How a share is computed."""

    count: int
    samples: int
    """In the largest piece."""
    expected_bytes: int
    limit_bytes: int

    def in_words(self) -> str:
        """As a person would tell it."""
        pieces = "1 piece" if self.count == 1 else f"{self.count} pieces"
        memory = f"about {self.expected_bytes / 1e6:,.0f} of {self.limit_bytes / 1e6:,.0f} MB"
        return f"micro-batches of {self.samples}: {pieces} per step, {memory}"


def fitted(peaks: Sequence[tuple[int, int]], more: int = 0) -> MemoryUse:
    """From the peaks of trial steps, (samples, bytes), and what comes on top of them in training.

    Between two trials of few samples the peak may not rise at all, because memory is used again that was taken before;
    so the line rises as from the first trial to the last or as from the last but one, whichever is steeper, and lies
    above all of them.
    """
    most, last = peaks[-1]
    slopes = [(last - peak) / (most - samples) for samples, peak in (peaks[0], *peaks[-2:-1]) if samples < most]
    slope = max([0.0, *slopes])
    return MemoryUse(fixed=more + round(max(peak - slope * samples for samples, peak in peaks)), per_sample=slope)


def largest(uses: Sequence[MemoryUse]) -> MemoryUse:
    """What is enough for each of them."""
    return MemoryUse(max(use.fixed for use in uses), max(use.per_sample for use in uses))


def pieces_within(limit_bytes: int, use: MemoryUse, samples: int, at_least: int = 1) -> Pieces:
    """The fewest pieces, `at_least` so many, in which a share of `samples` stays within the limit.

    `ConfigError` if not even single samples do.
    """
    room = (1 - _SPARE) * limit_bytes - use.fixed
    most = samples if use.per_sample * samples <= room else int(room // use.per_sample) if room > 0 else 0
    if most < 1:
        raise ConfigError(
            f"memory_limit is {limit_bytes / 1e6:,.0f} MB, but a worker needs about "
            f"{use.at(1) / (1 - _SPARE) / 1e6:,.0f} MB with one sample at a time: {use.fixed / 1e6:,.0f} MB for "
            f"program, weights, gradients and optimiser, and {use.per_sample / 1e6:,.1f} MB for a sample. Set a larger "
            "--memory-limit, add --checkpoint-activations, or use a smaller model."
        )
    count = min(max(-(-samples // most), at_least), samples)
    in_one = -(-samples // count)
    return Pieces(count, in_one, use.at(in_one), limit_bytes)
