"""All kinds of things that go by name, and everything there is of a kind, with a sentence about each.

Here: what `syncline list` shows. Not here: finding one of them when a run needs it (the files beside this one).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from syncline.catalogue.lookup import summary_of
from syncline.errors import UnknownName

__all__ = ["KINDS", "everything"]


def everything(kind: str) -> dict[str, str]:
    """The names of a kind, sorted, with a sentence about each."""
    if kind not in KINDS:
        raise UnknownName.among("list of", kind, KINDS)
    found = KINDS[kind]()
    return {name: found[name] for name in sorted(found, key=str.lower)}


def _of(module: str, function: str) -> Callable[[], dict[str, str]]:
    """The sentences of a table in this package."""

    def sentences() -> dict[str, str]:
        table: Mapping[str, Any] = getattr(importlib.import_module(f"syncline.catalogue.{module}"), function)()
        return {name: _without_its_name(name, summary_of(thing)) for name, thing in table.items()}

    return sentences


def _regularizers() -> dict[str, str]:
    from syncline.catalogue import regularizers

    penalties = {name: f"Penalty. {summary_of(thing)}" for name, thing in regularizers.penalties().items()}
    constraints = {}
    for name, thing in regularizers.constraints().items():
        made_of = thing.args[0] if hasattr(thing, "args") else thing
        constraints[name] = f"Constraint. {summary_of(made_of)}"
    return {**penalties, **constraints}


def _models() -> dict[str, str]:
    from syncline.zoo import elsewhere, registry

    found = {name: registry.card(name).summary for name in registry.names()}
    for package in elsewhere.PACKAGES.values():
        if package.is_installed:
            found.update(dict.fromkeys(package.names(), ""))
    return found


def _data() -> dict[str, str]:
    from syncline.data import named

    return {name: summary_of(inspect.getmodule(type(named.named(name)))) for name in named.names()}


def _strategies() -> dict[str, str]:
    from syncline.strategies.presets import PRESETS

    return {preset.name: f"{preset.after}. {preset.paper}." for preset in PRESETS.values()}


def _without_its_name(name: str, summary: str) -> str:
    return "" if summary.startswith(f"{name}(") else summary


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "layers": _of("layers", "names"),
    "activations": _of("activations", "table"),
    "losses": _of("losses", "listed"),
    "optimizers": _of("optimizers", "table"),
    "schedules": _of("schedules", "listed"),
    "initializers": _of("initializers", "table"),
    "regularizers": _regularizers,
    "metrics": _of("metrics", "listed"),
    "models": _models,
    "data": _data,
    "strategies": _strategies,
}
"""What there is a list of."""
