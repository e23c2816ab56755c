"""`Strategy`: an answer to each of the four questions. How workers synchronize, as data.

Here: the type and its text form. Not here: which answers work together (`table.py` and what each method declares in
`methods/`), the published strategies by name (`presets.py`), strategies made of strategies (`hierarchy.py`,
`switching.py`).

A strategy prints as what one would type, and is read back from it:

    updates(outer=nesterov(lr=0.7, momentum=0.9)) | every(50) | everyone | int8
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from syncline.errors import ConfigError
from syncline.strategies.answers import ANSWERS, Answers, text_of
from syncline.strategies.how import Exact, How
from syncline.strategies.method import AnswersMethod
from syncline.strategies.table import method_for
from syncline.strategies.what import Gradients, What
from syncline.strategies.when import Every, When
from syncline.strategies.whom import Everyone, Whom

__all__ = ["Strategy"]

_KINDS: dict[str, tuple[type, ...]] = {
    question: tuple(kind for asked, kind in ANSWERS.values() if asked == question) for question in Answers._fields
}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How workers synchronize. Invalid combinations fail fast and suggest a valid one.

    >>> from syncline.strategies.what import Updates
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
        self.method  # noqa: B018  # made once, to see that there is one

    @property
    def answers(self) -> Answers:
        return Answers(self.what, self.when, self.whom, self.how)

    @property
    def method(self) -> AnswersMethod:
        """The built-in method that serves these answers."""
        return method_for(self.answers)

    @property
    def levels(self) -> dict[str, Strategy]:
        """For tables: the strategies it is made of, by where they apply."""
        return {"": self}

    def encoded(self, how: How) -> Strategy:
        """The same strategy with another encoding."""
        return replace(self, how=how)

    def __str__(self) -> str:
        return " | ".join(map(text_of, self.answers))
