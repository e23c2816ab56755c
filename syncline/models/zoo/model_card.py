"""`ModelCard`: the description of a model, as plain data.

Here: the type. Not here: the cards (`cards.py`), and the lookup by name (`registry.py`). Nothing here imports torch, so
that the driver can check a run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ReferenceSize:
    """The size of a model for one dataset, with the default options."""

    data: str
    """The name of the dataset."""
    input_shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None
    """Number of distinct tokens; None if inputs are not tokens."""
    parameters: int


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The description of a model, with recommended training settings.

    Optimizer and schedule are named as in `torch.optim` and `torch.optim.lr_scheduler`. The schedule advances once
    per optimizer step. Values that depend on the run are filled in later: the length (`T_max`, `total_steps`) and, for
    OneCycleLR, the peak (`max_lr`, the optimizer's `lr`).
    """

    name: str
    summary: str
    """One sentence."""
    paper: str
    """The paper that introduced it."""
    module: str
    """Import path of its module."""
    reference: ReferenceSize | None = None
    """Its size for a common dataset; None for a model of an external package."""
    external_name: str | None = None
    """Its name in the external package, if it is from one; then its options are that package's."""
    function: str = "build"
    """The function in that module that builds it."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The options of that function, with defaults."""
    takes: Literal["floats", "tokens", "both", "graph"] = "floats"
    """The type of its inputs. A model for tokens gets the vocabulary size, and has an output per token; one for a graph
    gets numbers of nodes, and computes with their neighbors."""
    target: Literal["given", "input"] = "given"
    """The target of the loss: the data's target, or the input itself."""
    learns_by: Literal["gradients", "sums"] = "gradients"
    """With sums the model brings its own optimizer, and neither that nor the loss can be another."""
    loss: str
    optimizer: Mapping[str, object]
    """`name` and arguments."""
    schedule: Mapping[str, object] | None
    """`name`, and the arguments that do not depend on the run."""
    batch: int
    """Global batch size."""
    metrics: tuple[str, ...]
    epochs: int
