"""`trace_chain`: from a model to its chain of units.

The model is recorded with two batch sizes, in training and in evaluation (`recording.py`, `program.py`). If a module
inside does what cannot be recorded, it is kept whole, and the model is recorded again. A unit begins with each call of
a module that is kept whole, and with each function that uses parameters itself; functions in between belong to the unit
before them. The result is checked against the model (`checking.py`).

A model can name its units itself, with a method `pipeline_units()` that returns modules of it. The first takes the
inputs of the model, each other one the output of the one before it, and the last makes the output of the model.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.layouts.chain.chain import Chain, Unit
from syncline.layouts.chain.checking import check_chain
from syncline.layouts.chain.program import Program
from syncline.layouts.chain.recording import Recording, Step, Untraceable, record
from syncline.layouts.chain.refusal import refusal
from syncline.layouts.chain.untouched import rows, untouched
from syncline.layouts.chain.whole_modules import WholeModules, has_hooks

_SIZES = (2, 3)
"""The batch sizes that are recorded. One sample would be too few for batch normalization."""


def trace_chain(model: nn.Module, example: tuple[Tensor, ...]) -> Chain:
    """The units of a model; `example` is a batch of its inputs, of any size.

    `ConfigError` with the reason if the model cannot be cut. Trace under the same autocast and with the same memory
    format as in training, and again if hooks are added or if the model changes what it does.
    """
    _check_example(example)
    if has_hooks(model):
        raise refusal(model, "it has hooks, which no stage would call. Register them on the modules inside")
    named = _named_units(model)
    forward: Callable[..., Any] = functools.partial(_run, named) if named else model
    whole = WholeModules(model, named)
    while True:
        try:
            programs = {mode: _program(model, forward, example, whole, mode=mode) for mode in (True, False)}
            break
        except Untraceable as problem:
            if not problem.scope or problem.scope in whole.reasons:
                raise refusal(model, problem.reason) from problem
            whole.keep(problem.scope, problem.reason)
    chain = _chain(model, programs, whole)
    check_chain(chain, example)
    return chain


def _check_example(example: Sequence[Tensor]) -> None:
    if not example or not all(isinstance(t, Tensor) and t.dim() and len(t) for t in example):
        raise ConfigError(
            "A pipeline needs a batch of tensors, with samples along the first dimension, as the inputs of the model.",
            code="layout", layout="pipeline", reason="inputs",
        )  # fmt: skip


def _program(
    model: nn.Module, forward: Callable[..., Any], example: Sequence[Tensor], whole: WholeModules, *, mode: bool
) -> Program:
    def recording(samples: int) -> Recording:
        return record(model, forward, rows(example, samples), whole)

    with untouched(model):
        if model.training != mode:  # modules that were set to evaluation one by one stay so in training
            model.train(mode)
        forward(*rows(example, _SIZES[0]))  # what modules make in their first pass and keep is there from now on
        return Program(recording(_SIZES[0]), recording(_SIZES[1]))


def _named_units(model: nn.Module) -> list[nn.Module]:
    """The units that the model names itself; empty if it names none."""
    named = getattr(model, "pipeline_units", None)
    if named is None:
        return []
    units = list(named())
    mine = set(model.modules())
    if not units or not all(isinstance(unit, nn.Module) and unit in mine for unit in units):
        raise refusal(model, "its pipeline_units() must return a list of modules that belong to it")
    return units


def _run(units: Sequence[nn.Module], *inputs: Any) -> Any:
    for unit in units:
        output = unit(*inputs)
        inputs = output if isinstance(output, tuple) else (output,)
    return output


def _chain(model: nn.Module, programs: dict[bool, Program], whole: WholeModules) -> Chain:
    begins = {mode: _begins(model, program.steps) for mode, program in programs.items()}
    names = [name for name, _ in begins[True]]
    starts = {mode: _aligned(names, begins[mode], len(program.steps)) for mode, program in programs.items()}
    units = [0] + [
        unit
        for unit in range(1, len(names))
        if all(program.can_cut(starts[mode][unit]) for mode, program in programs.items())
    ]
    edges = [*units, len(names)]
    cuts = {mode: [starts[mode][edge] for edge in edges] for mode in programs}
    made = []
    for number, (low, _) in enumerate(itertools.pairwise(edges)):
        steps = [
            program.steps[n]
            for mode, program in programs.items()
            for n in program.needed(cuts[mode][number], cuts[mode][number + 1], is_last=number == len(units) - 1)
        ]
        made.append(Unit(names[low] if names else "model", model, tuple(steps)))
    return Chain(model, made, programs, cuts, whole.reasons)


def _aligned(names: Sequence[str], begins: Sequence[tuple[str, int]], length: int) -> list[int]:
    """Where each of the named units begins in a program, and where the program ends.

    A unit that only the other mode has is empty here: it begins where the next one does.
    """
    at = dict(begins)
    starts = [length]
    for name in reversed(names[1:]):
        starts.insert(0, min(at.get(name, length), starts[0]))
    return [0, *starts]


def _begins(model: nn.Module, steps: Sequence[Step]) -> list[tuple[str, int]]:
    """The names of the units and the steps that begin them."""
    paths = {module: name for name, module in model.named_modules()}
    found: list[tuple[str, int]] = []
    times: Counter[str] = Counter()
    owner = None
    for at, step in enumerate(steps):
        subject = _subject(step, paths)
        if subject is None or (not isinstance(step.target, nn.Module) and subject == owner):
            continue
        owner = subject
        times[subject] += 1
        found.append((subject if times[subject] == 1 else f"{subject}:{times[subject]}", at))
    return found


def _subject(step: Step, paths: dict[nn.Module, str]) -> str | None:
    """The module that is called, or the owner of the parameters that a function uses; None for other functions."""
    if isinstance(step.target, nn.Module):
        inside = (paths[m] for m in step.target.modules() if m in paths)
        return next(inside, None) or type(step.target).__name__
    held = next(_parameters(step), None)
    if held is None:
        return None
    return held.rpartition(".")[0] or held


def _parameters(step: Step) -> Iterator[str]:
    for part in step.arguments.held():
        if isinstance(part.make({}, 0), nn.Parameter):
            yield part.name
