"""The first question: what is exchanged? Answers as data; nothing is moved here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from syncline.compute.outer import OuterOptimizer, average
from syncline.errors import ConfigError, UnknownName

__all__ = ["Gradients", "Models", "Updates", "What"]

_SCORES = ("loss", "accuracy")


@dataclass(frozen=True)
class Gradients:
    """Gradients, before the optimizer steps: all workers apply the same one."""


@dataclass(frozen=True)
class Updates:
    """Each worker steps by itself; what it changed since the last exchange is combined by an outer optimizer."""

    outer: OuterOptimizer = field(default_factory=average)
    optimizer_state: bool = False
    """Whether the optimizers' own state (momentum, say) is averaged, too."""

    def __post_init__(self) -> None:
        if not hasattr(self.outer, "step"):
            raise ConfigError(
                f"updates(outer={self.outer!r}): the outer optimizer must be one of average, sgd, nesterov, "
                "block_momentum and elastic, such as nesterov(lr=0.7, momentum=0.9)."
            )
        if not isinstance(self.optimizer_state, bool):
            raise ConfigError(
                f"updates(optimizer_state={self.optimizer_state!r}): whether the optimizers' state is averaged, too, "
                "must be True or False."
            )


@dataclass(frozen=True)
class Models:
    """Whole models compete: two workers continue with the one of their models that has the better score."""

    score: str = "loss"
    """What is compared on the held-out data: the loss (lower is better) or the accuracy."""
    held_out: float = 0.02
    """The part of the training data that is held out for scoring models."""
    perturb: float | None = None
    """The factor by which a winner's hyperparameters vary when they are passed on; None: they do not."""

    def __post_init__(self) -> None:
        if self.score not in _SCORES:
            raise UnknownName.among("score", str(self.score), _SCORES, more="Write models(score='loss'), for example.")
        if not _is_number(self.held_out) or not 0 < self.held_out <= 0.5:
            raise ConfigError(
                f"models(held_out={self.held_out!r}): the part of the training data that is kept for tournaments must "
                "be more than 0 and at most 0.5, such as 0.02."
            )
        if self.perturb is not None and (not _is_number(self.perturb) or self.perturb < 1):
            raise ConfigError(
                f"models(perturb={self.perturb!r}): the factor by which hyper-parameters vary must be 1 or more, such "
                "as 1.2, or None if they are to stay as they are."
            )


What = Gradients | Updates | Models


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
