"""What is known of a model before a run starts, for predicting memory and time under any layout.

Here: `ModelFacts` and `DividedFacts`, plain data. Not here: finding them out (`workers/layout_facts.py`), and what
follows from them (`forecast.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.layouts.cut import UnitCost


@dataclass(frozen=True, kw_only=True)
class DividedFacts:
    """A model whose large layers are divided over some workers."""

    largest_bytes: int
    """Of the workers' parts of the trained parameters, the largest."""
    computed_bytes: int
    """The parameters whose gradients a worker computes: its rows of divided layers, and all of the others."""
    divided: frozenset[str] = frozenset()
    """The names of the divided parameters."""
    layers: int = 0
    exchanged_bytes: float = 0.0
    """Activations and gradients that the workers gather, per sample."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model, its optimizer, and what its layers cost."""

    parameters: Mapping[str, int]
    """The bytes of the trained parameters, by name; tied ones once."""
    largest_layer: int
    """The bytes of the trained parameters of the largest module."""
    constants: int = 0
    """The bytes of frozen parameters and buffers, which each worker holds."""
    optimizer_state: float = 2.0
    """The size of the optimizer's state relative to the trained parameters: 2 for Adam, 1 for momentum."""
    units: tuple[UnitCost, ...] = ()
    """The units that a pipeline can be cut between; the whole model is one if it cannot be cut."""
    uncut_because: str | None = None
    """Why the model cannot be cut into stages."""
    divided: Mapping[int, DividedFacts | str] = field(default_factory=dict)
    """By number of slices, how `tensor` divides the model, or why it cannot."""
    has_batch_norm: bool = False

    @property
    def parameter_bytes(self) -> int:
        """The trained parameters."""
        return sum(self.parameters.values())

    @property
    def seconds_per_sample(self) -> float:
        """Forward and backward."""
        return sum(unit.seconds / unit.samples for unit in self.units)
