"""The kinds of `syncline list`, and the names of each kind with a description.

Not here: resolving a name when a run needs it (`models/catalog/`, `data/named.py`, `strategies/`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from syncline.errors import UnknownName
from syncline.models.catalog.lookup import summary_of


def everything(kind: str) -> dict[str, str]:
    """The sorted names of a kind, with a description of each."""
    if kind not in KINDS:
        raise UnknownName.among("list of", kind, KINDS)
    found = KINDS[kind]()
    return {name: found[name] for name in sorted(found, key=str.lower)}


def _of(module: str, function: str) -> Callable[[], dict[str, str]]:
    """The descriptions in a table of `models/catalog/`."""

    def descriptions() -> dict[str, str]:
        table: Mapping[str, Any] = getattr(importlib.import_module(f"syncline.models.catalog.{module}"), function)()
        return {name: _without_its_name(name, summary_of(thing)) for name, thing in table.items()}

    return descriptions


def _regularizers() -> dict[str, str]:
    from syncline.models.catalog import regularizers

    penalties = {name: f"Penalty. {summary_of(thing)}" for name, thing in regularizers.penalties().items()}
    constraints = {}
    for name, thing in regularizers.constraints().items():
        made_of = thing.args[0] if hasattr(thing, "args") else thing
        constraints[name] = f"Constraint. {summary_of(made_of)}"
    return {**penalties, **constraints}


def _models() -> dict[str, str]:
    from syncline.models.zoo import external, registry

    found = {name: registry.card(name).summary for name in (*registry.names(), *registry.graph_names())}
    for package in external.PACKAGES.values():
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
"""By the name that the command takes."""
