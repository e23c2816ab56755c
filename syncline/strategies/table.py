"""The table of built-in methods: one line each.

Here: which method serves four answers, and for answers that no method serves, why not and which are nearest. Not here:
what each method serves and needs, which its own file declares (`methods/`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from syncline.errors import ConfigError
from syncline.strategies.answers import Answers, brief, quoted, text_of
from syncline.strategies.method import AnswersMethod, Misfit
from syncline.strategies.methods.allreduce import AllReduce as AllReduce
from syncline.strategies.methods.asynchronous_gossip import AsynchronousGossip as AsynchronousGossip
from syncline.strategies.methods.asynchronous_servers import AsynchronousServers as AsynchronousServers
from syncline.strategies.methods.elastic_averaging import ElasticAveraging as ElasticAveraging
from syncline.strategies.methods.gossip import Gossip as Gossip
from syncline.strategies.methods.hogwild import Hogwild as Hogwild
from syncline.strategies.methods.local_sgd import LocalSGD as LocalSGD
from syncline.strategies.methods.synchronous_servers import SynchronousServers as SynchronousServers
from syncline.strategies.methods.tournament import Tournament as Tournament

METHODS: tuple[type[AnswersMethod], ...] = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, type) and AnswersMethod in kind.__bases__
)
"""Every method that is imported above."""

_WEIGHTS = {"what": 2.2, "when": 2.0, "whom": 2.5, "how": 2.0}
"""How much it costs to change an answer. With whom is closest to what the user has in mind: it is changed last."""


class _Repair(NamedTuple):
    """What a method would have to change in some answers to serve them."""

    misfits: list[Misfit]
    answers: Answers | None
    """The answers that it serves; None if it has no good ones."""
    cost: float


def method_for(answers: Answers) -> AnswersMethod:
    """The method that serves these answers; `ConfigError` with the nearest valid ones if none does."""
    repairs = {method: _repair(method, answers) for method in METHODS}
    for method, repair in repairs.items():
        if not repair.misfits:
            return method(*answers)
    # The reason comes from a method that keeps the user's `whom` and most of the rest.
    keeping = {m: r for m, r in repairs.items() if type(answers.whom) in m.serves()["whom"]} or repairs
    misfit = min(keeping.items(), key=lambda pair: (_wrong_types(pair[0], answers), pair[1].cost))[1].misfits[0]
    nearest = _cheapest(repairs.values())
    offending = text_of(getattr(answers, misfit.question))
    raise ConfigError(
        f"{quoted(brief(answers))}: {quoted(offending)} does not work here. {misfit.because} "
        f"Use {quoted(brief(nearest))}.",
        code="invalid-combination", question=misfit.question, answer=offending, instead=brief(nearest),
    )  # fmt: skip


def nearest_answers(answers: Answers, among: Collection[type[AnswersMethod]]) -> Answers:
    """The answers nearest to these that one of some methods serves."""
    return _cheapest([_repair(method, answers) for method in among])


def _cheapest(repairs: Collection[_Repair]) -> Answers:
    found = min(repairs, key=lambda repair: repair.cost).answers
    assert found is not None, "some method can always be reached"
    return found


def _repair(method: type[AnswersMethod], answers: Answers) -> _Repair:
    misfits, repaired = [], answers
    while (misfit := _first_misfit(method, repaired)) is not None:
        misfits.append(misfit)
        if misfit.instead is None:
            return _Repair(misfits, None, float("inf"))
        repaired = repaired._replace(**misfit.instead)
    return _Repair(misfits, repaired, _cost(answers, repaired))


def _first_misfit(method: type[AnswersMethod], answers: Answers) -> Misfit | None:
    for question, kinds in method.serves().items():
        if not isinstance(getattr(answers, question), kinds):
            instead = method.instead(question, answers)
            reason = method.because.get(question, f"{method.title} does not support it.")
            return Misfit(question, reason, None if instead is None else {question: instead})
    return method(*answers).misfit()


def _wrong_types(method: type[AnswersMethod], answers: Answers) -> int:
    return sum(type(getattr(answers, question)) not in kinds for question, kinds in method.serves().items())


def _cost(before: Answers, after: Answers) -> float:
    """How far two combinations are apart. It is cheap to change an answer that was left out, or to leave one out."""

    def cost_of(question: str, old: Any, new: Any) -> float:
        usual = Answers._field_defaults[question]
        factors = (0.3 if old == usual else 1.0, 0.9 if new == usual else 1.0, 0.5 if type(old) is type(new) else 1.0)
        return _WEIGHTS[question] * math.prod(factors)

    pairs = zip(Answers._fields, before, after, strict=True)
    return sum(cost_of(question, old, new) for question, old, new in pairs if old != new)
