"""`Strategy`: an answer to each of the four questions. How workers keep in agreement, as data.

Here: the type, which combinations make sense, and its text form. Not here: the published ones by name (`presets.py`),
strategies made of strategies (`hierarchy.py`, `switching.py`), what a run must have for one (`feasible.py`), carrying
one out (the exchanges, one file each).

A strategy prints as what one would type, and is read back from it:

    updates(outer=nesterov(lr=0.7, momentum=0.9)) | every(50) | everyone | int8

What makes sense:

    what          when                       whom          how
    gradients     every(1)                   everyone      any
    gradients     every(1), async, stale,    server        any but powersgd
                  layerwise
    gradients     async                      memory        exact: nothing is sent
    updates       every(n)                   everyone      any but powersgd; with optimizer_state: exact
    updates       every(n), outer elastic    server        exact
    updates       every(n), async            neighbours    exact; outer average
    models        every(n)                   rivals        exact
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncline.algorithms import outer
from syncline.config.spec import Spec
from syncline.errors import ConfigError
from syncline.strategies.how import BF16, Exact, How, Int8, OneBit, PowerSGD, TopK
from syncline.strategies.what import Gradients, Models, Updates, What
from syncline.strategies.when import Async, Every, Layerwise, Stale, When
from syncline.strategies.whom import Everyone, Memory, Neighbours, Rivals, Server, Whom

__all__ = ["ANSWERS", "OUTERS", "Strategy", "brief", "brief_text_of", "quoted", "text_of"]

ANSWERS: dict[str, tuple[str, type]] = {
    "gradients": ("what", Gradients),
    "updates": ("what", Updates),
    "models": ("what", Models),
    "every": ("when", Every),
    "async": ("when", Async),
    "stale": ("when", Stale),
    "layerwise": ("when", Layerwise),
    "everyone": ("whom", Everyone),
    "server": ("whom", Server),
    "neighbours": ("whom", Neighbours),
    "memory": ("whom", Memory),
    "rivals": ("whom", Rivals),
    "exact": ("how", Exact),
    "bf16": ("how", BF16),
    "int8": ("how", Int8),
    "onebit": ("how", OneBit),
    "topk": ("how", TopK),
    "powersgd": ("how", PowerSGD),
}
"""Each answer by name, and the question it answers."""

OUTERS: dict[str, type] = {
    "average": outer.average,
    "sgd": outer.sgd,
    "nesterov": outer.nesterov,
    "block_momentum": outer.block_momentum,
    "elastic": outer.elastic,
}
"""The outer optimisers that `updates` takes."""

_KINDS: dict[str, tuple[type, ...]] = {
    question: tuple(kind for asked, kind in ANSWERS.values() if asked == question)
    for question in ("what", "when", "whom", "how")
}


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
        answers = _Answers(self.what, self.when, self.whom, self.how)
        mistake = _mistake(answers)
        if mistake is not None:
            raise ConfigError(f"{mistake.because} Use {quoted(brief(_nearest(answers)))}.{mistake.else_}")

    def __str__(self) -> str:
        return " | ".join(text_of(getattr(self, question)) for question in _KINDS)


class _Answers(NamedTuple):
    """Four answers that may not go together."""

    what: What
    when: When
    whom: Whom
    how: How


class _Mistake(NamedTuple):
    """Why some answers do not go together, and the answers that would put this right."""

    because: str
    instead: dict[str, Any]
    else_: str = ""


def _nearest(answers: _Answers) -> Strategy:
    """The strategy that is left when all mistakes are put right, one after the other."""
    mistake = _mistake(answers)
    while mistake is not None:
        answers = answers._replace(**mistake.instead)
        mistake = _mistake(answers)
    return Strategy(**answers._asdict())


def _mistake(answers: _Answers) -> _Mistake | None:
    """The first thing that is wrong with a combination of answers; None if it makes sense."""
    if isinstance(answers.what, Models) or isinstance(answers.whom, Rivals):
        return _mistake_in_tournament(answers)
    if isinstance(answers.whom, Memory):
        return _mistake_in_memory(answers)
    if isinstance(answers.whom, Neighbours):
        return _mistake_in_gossip(answers)
    if isinstance(answers.whom, Server):
        return _mistake_at_server(answers)
    return _mistake_with_everyone(answers)


def _mistake_in_tournament(answers: _Answers) -> _Mistake | None:
    what, when, whom, how = answers
    rounds = when if isinstance(when, Every) and when.steps > 1 else Every(100)
    if not isinstance(what, Models):
        return _Mistake(
            f"Rivals compare whole models and keep the better one, so there is nothing to do for them with "
            f"{_name(what)}, which are added up.",
            {"what": Models(), "when": rounds},
        )
    if not isinstance(whom, Rivals):
        return _Mistake(
            f"Whole models compete in pairs, one against one, which {_name(whom)} cannot do.",
            {"whom": Rivals(), "when": rounds},
        )
    if not isinstance(when, Every):
        return _Mistake(
            f"In a tournament two rivals meet, so both must be there at the same step, which {_name(when)} does not "
            "promise.",
            {"when": rounds},
        )
    if not isinstance(how, Exact):
        return _Mistake(
            f"A model that has gone through {text_of(how)} is not the one that won, and what was left out cannot be "
            "sent later as it can for a sum.",
            {"how": Exact()},
        )
    return None


def _mistake_in_memory(answers: _Answers) -> _Mistake | None:
    what, when, _, how = answers
    if not isinstance(what, Gradients):
        return _Mistake(
            "In memory there is one copy of the parameters for all workers, so none has updates of its own to combine.",
            {"what": Gradients()},
        )
    if when != Async():
        return _Mistake(
            "Workers who share memory write each gradient into the one copy as soon as it is there, and see what "
            f"others wrote at once, so {text_of(when)} has no meaning.",
            {"when": Async()},
        )
    if not isinstance(how, Exact):
        return _Mistake(
            f"Through memory nothing is sent, so there is nothing for {text_of(how)} to make smaller.",
            {"how": Exact()},
        )
    return None


def _mistake_in_gossip(answers: _Answers) -> _Mistake | None:
    what, when, _, how = answers
    if not isinstance(what, Updates):
        return _Mistake(
            "Neighbours that exchange gradients would never bring their parameters together, and drift apart.",
            {"what": Updates()},
        )
    if not isinstance(what.outer, outer.average):
        return _Mistake(
            "Neighbours average their parameters with each other; there is no point common to all that "
            f"{text_of(what.outer)} could move.",
            {"what": Updates()},
        )
    if what.optimizer_state:
        return _Mistake(_STATE_NEEDS_EVERYONE, {"what": Updates()})
    if isinstance(when, (Stale, Layerwise)):
        return _Mistake(
            f"Among neighbours nobody keeps the count that {_name(when)} needs: that is what a server does.",
            {"when": Async() if isinstance(when, Stale) else Every(1)},
        )
    if isinstance(when, Async) and when != Async():
        return _Mistake(
            "When two neighbours meet they average, which is push and fetch in one, so "
            f"{text_of(when)} has no meaning.",
            {"when": Async()},
        )
    if not isinstance(how, Exact):
        return _Mistake(
            f"Neighbours average parameters, and the error of {text_of(how)} would go straight into them; what was "
            "left out for one neighbour is of no use to the next.",
            {"how": Exact()},
        )
    return None


def _mistake_at_server(answers: _Answers) -> _Mistake | None:
    what, when, whom, how = answers
    assert isinstance(whom, Server)
    if isinstance(what, Gradients):
        if isinstance(when, Every) and when.steps > 1:
            return _Mistake(
                f"Gradients exchanged every {when.steps} steps all together would leave the steps between without any "
                "update.",
                {"when": Async(when.steps, when.steps)},
                " There gradients add up and a worker trains the parameters that it has.",
            )
        if isinstance(how, PowerSGD):
            return _Mistake(
                "PowerSGD takes two sums over all workers, the second of which follows from the first, and a server "
                "gets one message.",
                {"whom": Everyone()} if isinstance(when, Every) else {"how": Int8()},
            )
        return None
    assert isinstance(what, Updates)
    if not isinstance(what.outer, outer.elastic):
        return _Mistake(
            "A server applies gradients or holds the centre of an elastic average; to combine updates by "
            f"{text_of(what.outer)} needs all workers at once, which is an all-reduce.",
            {"whom": Everyone()} if isinstance(when, Every) else {"what": Gradients()},
        )
    if what.optimizer_state:
        return _Mistake(_STATE_NEEDS_EVERYONE, {"what": dataclasses.replace(what, optimizer_state=False)})
    if whom.optimizer is not None:
        return _Mistake(
            f"Updates move the centre at the server by the elastic force, so the server has no use for the optimiser "
            f"{text_of(whom.optimizer)}: the workers' own optimisers take the steps.",
            {"whom": Server(whom.shards)},
        )
    if not isinstance(when, Every):
        return _Mistake(
            "Workers pull at the elastic centre every so many of their steps, so "
            f"{text_of(when)} does not say how often.",
            {"when": Every(10)},
        )
    if not isinstance(how, Exact):
        return _Mistake(
            f"Worker and centre move towards each other by the same amount, which {text_of(how)} would make unequal.",
            {"how": Exact()},
        )
    return None


def _mistake_with_everyone(answers: _Answers) -> _Mistake | None:
    what, when, _, how = answers
    if not isinstance(when, Every):
        is_gradients = isinstance(what, Gradients)
        return _Mistake(
            f"An all-reduce needs everyone at the same step with the same numbers, which is against {text_of(when)}.",
            {"whom": Server()} if is_gradients else {"when": Every(10)},
        )
    if isinstance(what, Gradients):
        if when.steps > 1:
            return _Mistake(
                f"Gradients exchanged every {when.steps} steps would leave the steps between without any update.",
                {"what": Updates()},
                " There workers step by themselves in between. Or keep 'gradients | every(1)' with a larger --batch.",
            )
        return None
    assert isinstance(what, Updates)
    if isinstance(what.outer, outer.elastic):
        return _Mistake(
            "Elastic averaging ties each worker to a centre, which needs a server to live at.",
            {"whom": Server()},
        )
    if isinstance(how, PowerSGD):
        return _Mistake(
            "PowerSGD follows the gradients' matrices from one step to the next; updates are far apart and have turned "
            "elsewhere.",
            {"how": Int8()},
        )
    if what.optimizer_state and not isinstance(how, Exact):
        return _Mistake(
            f"The optimisers' state cannot be averaged through {text_of(how)}: it keeps running sums, in which what is "
            "left out would add up.",
            {"how": Exact()},
            " Or leave optimizer_state out.",
        )
    return None


_STATE_NEEDS_EVERYONE = (
    "The optimisers' state is averaged over everyone; with others it would fit no worker's parameters."
)


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


def brief(strategy: Strategy) -> str:
    """The strategy as a person would type it: questions with the usual answer are left out.

    >>> brief(Strategy(what=Updates(), when=Every(10)))
    'updates | every(10)'
    """
    answers = (strategy.what, strategy.when, strategy.whom, strategy.how)
    return " | ".join(brief_text_of(a) for a in answers if not isinstance(a, (Everyone, Exact)))


def brief_text_of(answer: Any) -> str:
    """An answer as a person would type it: `every(10)`, and `every(1)` where the number says more than its absence."""
    return f"every({answer.steps})" if isinstance(answer, Every) else text_of(answer)


def quoted(text: str) -> str:
    """In quotes as they are put around what one types; double ones if there are single ones in it."""
    return f'"{text}"' if "'" in text else f"'{text}'"


def _name(answer: Any) -> str:
    return type(answer).__name__.lower()
