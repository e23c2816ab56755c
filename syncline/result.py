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
    """Where plan, events, checkpoints and summary lie."""
    steps: int
    epochs: float
    seconds: float
    """From the call to the end, everything included."""
    samples_per_s: float
    """While training, over all workers."""
    peak_memory_bytes: dict[int, int]
    """The most memory that each worker had in use while training, by its number."""
    _load_model: Callable[[], torch.nn.Module] = field(repr=False)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The trained model, in evaluation mode; the object passed to `train` is left as it was."""
        return self._load_model()
