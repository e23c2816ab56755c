"""What a step takes with a layout: the measured step of replicated workers, changed as the layout changes it. Pure.

The layouts predict their own steps from the costs of layers (`layouts/forecast.py`). Here each of their parts is set in
relation to the same part for `replicated`, and the measured time of that is scaled: so the machine's speed is as it was
measured, and what `forecast` gets wrong about all layouts alike drops out.

Here: `predict_layout`. Not here: which layouts there are (`layouts/choice.py`), and strategies (`step.py`).
"""

from __future__ import annotations

import dataclasses
import math

from syncline.layouts.forecast import Forecast
from syncline.planning.cost.network import Network
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.step import Prediction, Term, TermName, Workload, computing_terms

_UNSURE = 0.3
"""How wrong the ratio of two layouts may be."""
_PASSES: tuple[TermName, ...] = ("forward", "backward")


def predict_layout(
    replicated: Prediction, forecast: Forecast, usual: Forecast, workload: Workload, network: Network
) -> Prediction:
    """The prediction for a layout, from that of `replicated` and the two forecasts of a step."""
    crowd = max(1.0, workload.workers * workload.profile.threads / network.cores)
    passes = _ratio(forecast.compute_s, usual.compute_s)
    busy = passes * (1 - forecast.bubble)
    # With fewer cores than workers, others compute while a stage waits: the bubble costs only what is left of it.
    whole = max(passes / crowd, busy)
    terms: list[Term] = []
    for term in computing_terms(workload, network):
        factor = busy if term.name in _PASSES else _ratio(forecast.update_s, usual.update_s)
        if term.name in ("data", "compute"):
            factor = 1.0
        terms.append(_scaled(term, factor))
    alone = Range.sum(term.seconds for term in computing_terms(workload, network) if term.name in _PASSES)
    exchange = _ratio(forecast.exchange_s, usual.exchange_s)
    for term in replicated.terms:
        if term.name == "exchange":
            terms.append(_scaled(term, exchange))
        elif term.name == "waiting":
            bubble = _around(alone * (whole - busy)) if whole > busy else Range.exactly(0.0)
            facts = {**term.facts, "bubble": forecast.bubble}
            terms.append(Term(name="waiting", seconds=term.seconds + bubble, facts=facts))
    more = forecast.largest.total - usual.largest.total
    memory = replicated.memory_bytes
    values = (max(0.0, value + more) for value in (memory.low, memory.mid, memory.high))
    return dataclasses.replace(
        replicated, layout=str(forecast.layout), terms=tuple(terms), bytes_per_step=float(forecast.moved_bytes),
        memory_bytes=Range(*values) if memory.mid else memory,
    )  # fmt: skip


def _ratio(value: float, usual: float) -> float:
    return value / usual if usual > 0 and math.isfinite(value) else 1.0


def _scaled(term: Term, factor: float) -> Term:
    seconds = term.seconds * factor
    return Term(
        name=term.name,
        seconds=seconds if math.isclose(factor, 1.0) else _around(seconds),
        facts={**term.facts, "of_replicated": factor},
    )


def _around(seconds: Range) -> Range:
    return Range(seconds.low * (1 - _UNSURE), seconds.mid, seconds.high * (1 + _UNSURE))
