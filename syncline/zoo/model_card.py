"""`ModelCard`: what is known about a model before it is built, as plain data.

Here: the type. Not here: the cards (`cards.py`), and the lookup by name (`registry.py`). Nothing here imports torch, so
that a driver can check a run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Fitted", "ModelCard"]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A model as it is for one data set, with the options of its card: how large it is then."""

    data: str
    """The data set, by its name or the one that people know it by."""
    input_shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None
    """Of how many tokens the inputs are made; None if they are not tokens."""
    parameters: int


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What is worth knowing about a model before it is built; training settings are recommendations.

    Optimiser and schedule are named as in `torch.optim` and `torch.optim.lr_scheduler`. The schedule advances once
    for each optimiser step; what follows from the rest of the run is filled in later: its length (`T_max`,
    `total_steps`) and, for OneCycleLR, the peak (`max_lr`, the optimiser's `lr`).
    """

    name: str
    summary: str
    """One sentence."""
    paper: str
    """Where it comes from."""
    module: str
    """Import path of its file."""
    fitted: Fitted | None = None
    """Its size for a data set that it is often trained on; None for a model of another package."""
    elsewhere: str | None = None
    """What it is called in the package that it comes from, if that is another; then its options are that package's."""
    function: str = "build"
    """What makes it there."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The options of that function, with their defaults."""
    takes: Literal["floats", "tokens", "both"] = "floats"
    """What its inputs are; a model for tokens is told how many there are, and gives an output for each of them."""
    target: Literal["given", "input"] = "given"
    """What its output is compared with: the target that the data gives, or the input itself."""
    loss: str
    optimizer: Mapping[str, object]
    """`name`, and the arguments."""
    schedule: Mapping[str, object] | None
    """`name`, and the arguments that do not follow from the rest."""
    batch: int
    """Samples in the global batch."""
    metrics: tuple[str, ...]
    epochs: int
