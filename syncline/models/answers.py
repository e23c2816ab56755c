"""What a model's outputs mean, by the loss that it was trained with."""

from __future__ import annotations

from typing import Any, Literal

from syncline.config.spec import Spec

Answers = Literal["classes", "binary logits", "binary", "number", "numbers"]
"""The meaning of a model's outputs: class logits, a binary logit or probability, or plain numbers."""

LOGITS, PROBABILITIES, OUTPUT = "logits", "probabilities", "output"
"""The names of a model's own outputs."""

_CLASSES = ("crossentropy", "nll", "multimargin")


def answers_of(loss: Any) -> Answers | None:
    """The meaning of the outputs under this loss; None if its name does not show it."""
    name = loss.name if isinstance(loss, Spec) else getattr(loss, "__name__", type(loss).__name__)
    key = name.lower().replace("_", "").replace("-", "").removesuffix("loss")
    if key in ("binarycrossentropywithlogits", "bcewithlogits", "softmargin"):
        return "binary logits"
    if key in ("binarycrossentropy", "bce"):
        return "binary"
    if key in _CLASSES:
        return "classes"
    return "number" if isinstance(loss, Spec) else None


def main_name(answers: Answers) -> str:
    """The name of what the model returns, if that is one tensor."""
    if answers == "binary":
        return PROBABILITIES
    return LOGITS if answers in ("classes", "binary logits") else OUTPUT
