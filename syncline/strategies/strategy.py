"""`Strategy`: an answer to each of the four questions. How workers keep in agreement, as data.

Here: the type, which combinations make sense, and its text form. Not here: the published ones by name (`presets.py`),
carrying a strategy out (the exchanges, one file each).

A strategy prints as what one would type, and is read back from it:

    updates(outer=nesterov(lr=0.7, momentum=0.9)) | every(50) | everyone | int8
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from syncline.algorithms import outer
from syncline.errors import ConfigError
from syncline.strategies.how import BF16, Exact, How, Int8, OneBit, TopK
from syncline.strategies.what import Gradients, Updates, What
from syncline.strategies.when import Every, When
from syncline.strategies.whom import Everyone, Whom

__all__ = ["ANSWERS", "OUTERS", "Strategy"]

ANSWERS: dict[str, tuple[str, type]] = {
    "gradients": ("what", Gradients),
    "updates": ("what", Updates),
    "every": ("when", Every),
    "everyone": ("whom", Everyone),
    "exact": ("how", Exact),
    "bf16": ("how", BF16),
    "int8": ("how", Int8),
    "onebit": ("how", OneBit),
    "topk": ("how", TopK),
}
"""Each answer by name, and the question it answers."""

OUTERS: dict[str, type] = {
    "average": outer.average,
    "sgd": outer.sgd,
    "nesterov": outer.nesterov,
    "block_momentum": outer.block_momentum,
}
"""The outer optimisers that `updates` takes."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How workers keep in agreement.

    >>> str(Strategy(what=Updates(), when=Every(10)))
    'updates | every(steps=10) | everyone | exact'
    """

    what: What = field(default_factory=Gradients)
    when: When = field(default_factory=Every)
    whom: Whom = field(default_factory=Everyone)
    how: How = field(default_factory=Exact)

    def __post_init__(self) -> None:
        for question, kinds in _KINDS.items():
            answer = getattr(self, question)
            if not isinstance(answer, kinds):
                names = ", ".join(k.__name__ for k in kinds)
                raise ConfigError(f"{answer!r} does not answer the question '{question}'. Answers are: {names}.")
        if isinstance(self.what, Gradients) and self.when.steps > 1:
            raise ConfigError(
                f"Gradients exchanged every {self.when.steps} steps would leave the steps between without any update. "
                f"Use 'updates | every({self.when.steps})' (workers step by themselves in between), or keep "
                "'gradients | every(1)' with a larger --batch."
            )
        if isinstance(self.what, Updates) and self.what.optimizer_state and not isinstance(self.how, Exact):
            raise ConfigError(
                f"The optimisers' state cannot be averaged through {_text(self.how)}: it keeps running sums, in which "
                "what is left out would add up. Use exact, or leave optimizer_state out."
            )

    def __str__(self) -> str:
        return " | ".join(_text(getattr(self, question)) for question in _KINDS)


_KINDS: dict[str, tuple[type, ...]] = {
    "what": (Gradients, Updates),
    "when": (Every,),
    "whom": (Everyone,),
    "how": (Exact, BF16, Int8, OneBit, TopK),
}


def _text(answer: Any) -> str:
    """An answer as one types it: its name, and the settings that are not the default."""
    name = type(answer).__name__
    parts = []
    for part in dataclasses.fields(answer):
        value = getattr(answer, part.name)
        default = part.default_factory() if part.default_factory is not dataclasses.MISSING else part.default
        if value != default or (part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING):
            shown = _text(value) if dataclasses.is_dataclass(value) else repr(value)
            parts.append(f"{part.name}={shown}")
    name = name.lower() if name[0].isupper() else name
    return f"{name}({', '.join(parts)})" if parts else name
