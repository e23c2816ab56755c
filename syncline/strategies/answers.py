"""The four questions that a strategy answers, and its answers as text.

Here: `Answers`, every answer by name, and how one is written. Not here: the answers themselves (`what.py`, `when.py`,
`whom.py`, `how.py`), and which of them work together (`methods/`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from syncline.compute import outer
from syncline.config.spec import Spec
from syncline.strategies.how import BF16, Exact, How, Int8, OneBit, PowerSGD, TopK
from syncline.strategies.what import Gradients, Models, Updates, What
from syncline.strategies.when import Async, Every, Layerwise, Stale, When
from syncline.strategies.whom import Everyone, Memory, Neighbors, Rivals, Server, Whom

ANSWERS: dict[str, tuple[str, type]] = {
    kind.__name__.lower(): (question, kind)
    for question, kinds in {
        "what": (Gradients, Updates, Models),
        "when": (Every, Async, Stale, Layerwise),
        "whom": (Everyone, Server, Neighbors, Memory, Rivals),
        "how": (Exact, BF16, Int8, OneBit, TopK, PowerSGD),
    }.items()
    for kind in kinds
}
"""Each answer by name, and the question it answers."""

OUTERS: dict[str, type] = {
    kind.__name__: kind for kind in (outer.average, outer.sgd, outer.nesterov, outer.block_momentum, outer.elastic)
}
"""The outer optimizers that `updates` takes."""


class Answers(NamedTuple):
    """Four answers, which may not work together. The defaults are those of a question that is left out."""

    what: What = Gradients()
    when: When = Every()
    whom: Whom = Everyone()
    how: How = Exact()


def text_of(answer: Any) -> str:
    """An answer as one types it: its name, and the settings that are not the default."""
    if isinstance(answer, Spec):
        return str(Spec(answer.name.lower(), answer.options))
    name = type(answer).__name__
    parts = []
    for part in dataclasses.fields(answer):
        value = getattr(answer, part.name)
        default = part.default_factory() if part.default_factory is not dataclasses.MISSING else part.default
        if value != default or (part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING):
            shown = text_of(value) if dataclasses.is_dataclass(value) else repr(value)
            parts.append(f"{part.name}={shown}")
    name = name.lower() if name[0].isupper() else name
    return f"{name}({', '.join(parts)})" if parts else name


def brief(answers: Answers) -> str:
    """Four answers as a person would type them: `everyone` and `exact` are left out.

    >>> brief(Answers(what=Updates(), when=Every(10)))
    'updates | every(10)'
    """
    return " | ".join(brief_text_of(answer) for answer in answers if answer not in (Everyone(), Exact()))


def brief_text_of(answer: Any) -> str:
    """An answer as a person would type it: `every(10)`, and `every(1)`, where the number says more than its absence."""
    return f"every({answer.steps})" if type(answer) is Every else text_of(answer)


def quoted(text: str) -> str:
    """In quotes as they are put around what one types; double ones if there are single ones in it."""
    return f'"{text}"' if "'" in text else f"'{text}'"
