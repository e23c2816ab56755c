"""`syncline models`: the table of models. Not here: the model cards (`models/zoo/cards.py`)."""

from __future__ import annotations

import json as json_format
import shutil
import textwrap
from typing import Annotated

import typer

from syncline.models.zoo import registry as zoo
from syncline.models.zoo.external import PACKAGES, Package
from syncline.models.zoo.model_card import ModelCard

_NARROWEST, _WIDEST = 80, 120


def models(
    every: Annotated[
        bool, typer.Option("--all", help="Also list the models of timm and transformers, if installed.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the built-in models: parameters, input shape, paper.

    syncline models
    syncline models --all
    syncline train resnet18 --data cifar10 --workers 2
    """
    cards = [zoo.card(name) for name in zoo.names()]
    networks = [zoo.card(name) for name in zoo.graph_names()]
    others = {package: package.names() for package in PACKAGES.values() if package.is_installed} if every else {}
    if json:
        for card in (*cards, *networks):
            typer.echo(json_format.dumps(_as_json(card)))
        for names in others.values():
            for name in names:
                typer.echo(json_format.dumps({"name": name}))
        return
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    for line in (*_table(cards, width), *_of_graphs(networks, width), *_elsewhere(others, width, asked=every)):
        typer.echo(line)


def _as_json(card: ModelCard) -> dict[str, object]:
    fitted = card.reference
    assert fitted is not None, "every model card of the zoo has a size"
    return {
        "name": card.name,
        "summary": card.summary,
        "paper": card.paper,
        "parameters": fitted.parameters,
        "data": fitted.data,
        "input_shape": fitted.input_shape,
        "classes": fitted.classes,
        "takes": card.takes,
        "options": dict(card.options),
    }


def _table(cards: list[ModelCard], width: int) -> list[str]:
    """Per model, a line with its size on a dataset, then its description and paper."""
    widest = max(len(card.name) for card in cards)
    lines = [f"{'model':<{widest}}  {'parameters':>11}  {'on':<11}  input shape"]
    for card in cards:
        fitted = card.reference
        assert fitted is not None, "every model card of the zoo has a size"
        kind = "tokens" if fitted.vocabulary is not None else "floats"
        shape = f"{fitted.input_shape} {kind}"
        lines.append(f"{card.name:<{widest}}  {fitted.parameters:>11,}  {fitted.data:<11}  {shape}")
        description = f"{card.summary} {card.paper}."
        lines += _wrapped(description, width, "    ")
    return [*lines, "", f"{len(cards)} models. A run file for each: examples/runs."]


def _of_graphs(cards: list[ModelCard], width: int) -> list[str]:
    """Per graph network, a line with its name, then its description and paper."""
    lines = ["", "For graphs, such as: syncline train gcn --data cora"]
    for card in cards:
        lines += [card.name, *_wrapped(f"{card.summary} {card.paper}.", width, "    ")]
    return lines


def _elsewhere(others: dict[Package, list[str]], width: int, *, asked: bool) -> list[str]:
    lines: list[str] = []
    for package in PACKAGES.values():
        if package in others:
            lines += ["", f"{len(others[package]):,} of {package.name}:"]
            lines += _wrapped("  ".join(others[package]), width, "  ")
        elif not package.is_installed:
            lines.append(
                f"{package.name} adds more, as {package.prefix}:NAME: pip install 'syncline[{package.prefix}]'"
            )
        elif not asked:
            lines.append(f"More from {package.name}, as {package.prefix}:NAME: syncline models --all")
    if others:
        total = len(zoo.names()) + sum(map(len, others.values()))
        lines += ["", f"{total:,} models in total."]
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
