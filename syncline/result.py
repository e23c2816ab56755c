"""`Result`: what `syncline.train` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    metrics: dict[str, float]
    """The latest value of each metric, such as `test/accuracy`."""
    run_dir: Path
    """The directory with plan, events, checkpoints and summary."""
    steps: int
    epochs: float
    seconds: float
    """Wall-clock time of the whole call."""
    samples_per_s: float
    """Training throughput, summed over all workers."""
    peak_memory_bytes: dict[int, int]
    """Peak memory of each worker during training, by worker_id."""
    _load_model: Callable[[], torch.nn.Module] = field(repr=False)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The trained model, in evaluation mode. The object passed to `train` is not modified."""
        return self._load_model()
