"""A strategy in words: who sends what to whom, when, and how many bytes that is by theory.

The theory counts as the transports do: a worker's own buffer once in an all-reduce, what it pushes to a server (what it
pulls the server sends), and a model once for each neighbour or rival that gets it. Means over all workers, and without
the few numbers of control that ride along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, assert_never

from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import Exact, How, PowerSGD
from syncline.strategies.own import AnyStrategy, Own
from syncline.strategies.strategy import Strategy, text_of
from syncline.strategies.switching import Switching
from syncline.strategies.what import Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import Everyone, Memory, Neighbours, Rivals, Server

__all__ = ["Shapes", "bytes_per_exchange", "expected_bytes_per_step", "in_words"]

Shapes: TypeAlias = "Mapping[str, Sequence[int]] | Sequence[Sequence[int]] | int"
"""The parameters of a model: their shapes, best by name (`layerwise` speaks of names), or only how many numbers."""


def bytes_per_exchange(strategy: Strategy, shapes: Shapes) -> int:
    """What one worker makes known to one other, or to the sum of all, in one exchange of everything."""
    if isinstance(strategy.whom, Memory):
        return 0
    return _encoded(strategy.how, list(_by_name(shapes).values()))


def expected_bytes_per_step(
    strategy: AnyStrategy, shapes: Shapes, *, workers: int, optimizer_slots: int = 0
) -> float | None:
    """What a worker sends in a step, in the mean over steps and workers; None where only measuring can tell.

    `optimizer_slots` is how many numbers the optimiser keeps for each parameter (SGD with momentum 1, Adam 2), which
    matters where its state is averaged or passed on, too. Of strategies one after the other it is the last one's.
    """
    if isinstance(strategy, Own):
        return None
    if workers == 1:
        return 0.0
    if isinstance(strategy, Switching):
        return expected_bytes_per_step(strategy.last, shapes, workers=workers, optimizer_slots=optimizer_slots)
    if isinstance(strategy, Hierarchy):
        return _in_levels(strategy, shapes, workers, optimizer_slots)
    exact = 4.0 * _numel(shapes)
    once, when, whom = float(bytes_per_exchange(strategy, shapes)), strategy.when, strategy.whom
    if isinstance(whom, Memory):
        return 0.0
    if isinstance(whom, Neighbours):
        if isinstance(when, Async):
            # Every second worker, after each of its steps, gives its model to another and takes that one's.
            return 2 * exact * -(-workers // 2) / workers
        return exact * _receivers(whom.topology, workers) / _steps(strategy)
    if isinstance(whom, Rivals):
        is_paired = (workers - workers % 2) / workers  # an odd one out meets nobody
        return exact * (1 + optimizer_slots) * is_paired / _steps(strategy)
    if isinstance(when, Layerwise):
        return sum(_encoded(strategy.how, group) / rate for rate, group in _by_rate(when, shapes).items())
    if isinstance(when, Async):
        return once / when.push
    if isinstance(strategy.what, Updates) and strategy.what.optimizer_state:
        once += exact * optimizer_slots
    return once / _steps(strategy)


def in_words(strategy: AnyStrategy, workers: int, shapes: Shapes) -> list[str]:
    """The strategy as a person would tell it, for a model with these parameters."""
    if isinstance(strategy, Own):
        return [
            f"{strategy.name} in {strategy.where} decides what the workers exchange; how many bytes that is, the run "
            "will tell."
        ]
    if workers == 1:
        return ["There is only one worker: nothing is exchanged."]
    if isinstance(strategy, Switching):
        lines = []
        for phase in strategy.phases:
            lines += [f"{str(phase.until).capitalize()}:", *_indented(in_words(phase.strategy, workers, shapes))]
        return [*lines, "Then:", *_indented(in_words(strategy.last, workers, shapes))]
    if isinstance(strategy, Hierarchy):
        groups = max(2, workers // strategy.group)
        inside = in_words(strategy.inside_host, strategy.group, shapes)
        across = in_words(strategy.across_hosts, groups, shapes)
        return [
            f"Workers form groups: those of a host or, on a single host, {strategy.group} each.",
            "Inside a group:",
            *_indented(inside),
            "Across groups, each of which acts as one worker and speaks through its first:",
            *_indented(across),
        ]
    whom = strategy.whom
    if isinstance(whom, Everyone):
        return _with_everyone(strategy, shapes)
    if isinstance(whom, Server):
        return _with_server(strategy, whom, shapes)
    if isinstance(whom, Neighbours):
        return _with_neighbours(strategy, whom, workers, shapes)
    if isinstance(whom, Memory):
        return [
            "All workers train one copy of the parameters in shared memory, each at its own pace: after each backward "
            "pass a worker writes its update there, without a lock and without waiting.",
            "Nothing is sent.",
        ]
    if isinstance(whom, Rivals):
        return _with_rivals(strategy, workers, shapes)
    assert_never(whom)


def _with_everyone(strategy: Strategy, shapes: Shapes) -> list[str]:
    steps = _steps(strategy)
    if isinstance(strategy.what, Updates):
        lines = [f"{_every(steps)} all workers average what they have changed since the last time."]
        lines.append(f"The average is applied by the outer optimiser {strategy.what.outer!r}.")
        if strategy.what.optimizer_state:
            lines.append("The optimisers' own state is averaged, too.")
    else:
        lines = ["After each backward pass all workers sum their gradients, and each applies the sum."]
    return [*lines, f"Each worker sends {_amount(strategy.how, shapes, steps)}."]


def _with_server(strategy: Strategy, whom: Server, shapes: Shapes) -> list[str]:
    when = strategy.when
    server = "the server" if whom.shards == 1 else f"the {whom.shards} servers (each holds a part of the model)"
    it = "it" if whom.shards == 1 else "they"
    s = "s" if whom.shards == 1 else ""
    own = "the task's own optimiser"
    step = f"step{s} with {text_of(whom.optimizer) if whom.optimizer is not None else own}"
    pulled = _size(4 * _numel(shapes))
    if isinstance(strategy.what, Updates):
        steps = _steps(strategy)
        return [
            f"{_every(steps)} each worker, at its own pace, meets the centre at {server}: the two pull at each other "
            f"by {strategy.what.outer!r}, and neither jumps to the other.",
            f"Each worker sends {_amount(strategy.how, shapes, steps)}, and gets as much.",
        ]
    if isinstance(when, Every) or (isinstance(when, Stale) and when.bound == 0):
        return [
            f"After each backward pass every worker pushes its gradients to {server}. When all have come, {it} {step}, "
            "and every worker pulls the new parameters.",
            f"Each worker pushes {_amount(strategy.how, shapes, 1)}, and pulls {pulled} a step.",
        ]
    if isinstance(when, Stale):
        return [
            f"Each worker, at its own pace, pushes its gradients to {server} after each backward pass; {it} {step} as "
            f"they come. Nobody goes on who is more than {when.bound} steps ahead of the slowest.",
            f"Each worker pushes {_amount(strategy.how, shapes, 1)}, and pulls at most {pulled} a step.",
        ]
    if isinstance(when, Layerwise):
        rates = [f"parameters named {name}... {_every(steps).lower()}" for name, steps in when.rates.items()]
        rates.append(f"the largest parameter {_every(when.largest).lower()}")
        rates.append(f"all others {_every(when.others).lower()}")
        due = _by_rate(when, shapes)
        pushes = sum(_encoded(strategy.how, group) / rate for rate, group in due.items())
        pulls = sum(_encoded(Exact(), group) / rate for rate, group in due.items())
        return [
            f"Each worker, at its own pace, pushes gradients to {server} and fetches parameters, each at its rate: "
            f"{', '.join(rates)}. In between gradients add up; {it} {step} as they come.",
            f"Each worker pushes {_size(pushes)} and pulls {_size(pulls)} a step for {_numel(shapes):,} parameters"
            f"{_less(strategy.how, shapes)}.",
        ]
    assert isinstance(when, Async)
    return [
        f"Each worker, at its own pace, pushes its gradients to {server} {_every(when.push).lower()}"
        f"{' (until then they add up)' if when.push > 1 else ''} and fetches the parameters "
        f"{_every(when.fetch).lower()}; {it} {step} as gradients come.",
        f"Each worker pushes {_amount(strategy.how, shapes, when.push)}, and pulls "
        f"{_size(4 * _numel(shapes) / when.fetch)} a step.",
    ]


def _with_neighbours(strategy: Strategy, whom: Neighbours, workers: int, shapes: Shapes) -> list[str]:
    model = _size(4 * _numel(shapes))
    if isinstance(strategy.when, Async):
        return [
            "Each worker trains a model of its own at its own pace; after each of its steps every second worker "
            "averages its parameters with those of one of the others, drawn at random.",
            f"In such an averaging {model} go from one to the other and as many back.",
        ]
    count = _receivers(whom.topology, workers)
    others = "1 other" if count == 1 else f"{count:.3g} others"
    steps = _steps(strategy)
    a_step = f" ({_size(4 * _numel(shapes) * count / steps)} a step)" if steps > 1 else ""
    return [
        f"{_every(steps)} every worker averages its parameters with those of its neighbours on the graph "
        f"'{whom.topology}'.",
        f"Each worker sends {model} to {others}{a_step} for {_numel(shapes):,} parameters.",
    ]


def _with_rivals(strategy: Strategy, workers: int, shapes: Shapes) -> list[str]:
    what, steps = strategy.what, _steps(strategy)
    assert isinstance(what, Models)
    better = "lower loss" if what.score == "loss" else "higher accuracy"
    lines = [
        f"Each worker trains a model of its own. {_every(steps)} the workers are paired at random; two rivals send "
        f"each other their models, and each goes on with the one of {better} on held-out data "
        f"({100 * what.held_out:.3g}% of the training data, on which nobody trains)."
    ]
    if what.perturb is not None:
        lines.append(f"A winner's hyper-parameters vary by a factor of up to {what.perturb:g} when they are passed on.")
    if workers % 2:
        lines.append("As the workers are odd in number, one of them has no rival each time.")
    model = 4 * _numel(shapes)
    return [
        *lines,
        f"Each worker sends its whole model, {_size(model)} for {_numel(shapes):,} parameters ({_size(model / steps)} "
        "a step), and its optimiser's state.",
    ]


def _in_levels(strategy: Hierarchy, shapes: Shapes, workers: int, slots: int) -> float:
    """A group's first worker speaks for it, and passes on inside what was agreed on, unless that lies in memory."""
    group = min(strategy.group, workers)
    inside = expected_bytes_per_step(strategy.inside_host, shapes, workers=group, optimizer_slots=slots)
    across = expected_bytes_per_step(
        strategy.across_hosts, shapes, workers=max(1, workers // group), optimizer_slots=slots
    )
    assert inside is not None
    assert across is not None
    passed_on = 0.0 if isinstance(strategy.inside_host.whom, Memory) else 4 * _numel(shapes)
    return inside + (across + passed_on / _steps(strategy.across_hosts)) / group


def _amount(how: How, shapes: Shapes, steps: int) -> str:
    """How many bytes in one exchange, and in a step if that is another number."""
    sent = _encoded(how, list(_by_name(shapes).values()))
    each_step = f" ({_size(sent / steps)} a step)" if steps > 1 else ""
    return f"{_size(sent)} for {_numel(shapes):,} parameters{each_step}{_less(how, shapes)}"


def _less(how: How, shapes: Shapes) -> str:
    if isinstance(how, Exact):
        return ""
    ratio = 4 * _numel(shapes) / max(1, _encoded(how, list(_by_name(shapes).values())))
    return f", {ratio:.3g} times less than exact; the rest is sent later"


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _size(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def _every(steps: int) -> str:
    return "After each step" if steps == 1 else f"Every {steps} steps"


def _steps(strategy: Strategy) -> int:
    return strategy.when.steps if isinstance(strategy.when, Every) else 1


def _receivers(topology: str, workers: int) -> float:
    """To how many others a worker sends its model in one round, in the mean."""
    from syncline.algorithms.mixing import TOPOLOGIES, receivers

    mixing = TOPOLOGIES[topology](range(workers))
    return sum(len(receivers(mixing, rank)) for rank in range(workers)) / workers


def _encoded(how: How, shapes: Sequence[Sequence[int]]) -> int:
    if isinstance(how, PowerSGD):
        return how.cut(shapes).wire_bytes
    return how.codec().wire_bytes(sum(math.prod(shape) for shape in shapes))


def _by_name(shapes: Shapes) -> Mapping[str, Sequence[int]]:
    if isinstance(shapes, int):
        return {"": (shapes,)}
    return shapes if isinstance(shapes, Mapping) else {str(place): shape for place, shape in enumerate(shapes)}


def _by_rate(when: Layerwise, shapes: Shapes) -> dict[int, list[Sequence[int]]]:
    """The shapes of the parameters that are exchanged every so many steps."""
    named = _by_name(shapes)
    groups: dict[int, list[Sequence[int]]] = {}
    for name, rate in when.rate_of({name: math.prod(shape) for name, shape in named.items()}).items():
        groups.setdefault(rate, []).append(named[name])
    return groups


def _numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in _by_name(shapes).values())
