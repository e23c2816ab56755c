"""`syncline models`: the table of models. Not here: the cards themselves (`syncline/zoo/cards.py`)."""

from __future__ import annotations

import json as json_format
import shutil
import textwrap
from typing import Annotated

import typer

from syncline.zoo import registry as zoo
from syncline.zoo.elsewhere import PACKAGES, Package
from syncline.zoo.model_card import ModelCard

__all__ = ["models"]

_NARROWEST, _WIDEST = 80, 120


def models(
    every: Annotated[
        bool, typer.Option("--all", help="Also the names in timm and transformers, as far as these are installed.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """The models that can be trained by name: their size, what they take, and the paper.

    syncline models
    syncline models --all
    syncline train resnet18 --data cifar10 --workers 2
    """
    cards = [zoo.card(name) for name in zoo.names()]
    others = {package: package.names() for package in PACKAGES.values() if package.is_installed} if every else {}
    if json:
        for card in cards:
            typer.echo(json_format.dumps(_as_json(card)))
        for names in others.values():
            for name in names:
                typer.echo(json_format.dumps({"name": name}))
        return
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    for line in (*_table(cards, width), *_elsewhere(others, width, asked=every)):
        typer.echo(line)


def _as_json(card: ModelCard) -> dict[str, object]:
    fitted = card.fitted
    assert fitted is not None, "every model of the zoo says how large it is"
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
    """For each model a line with its size for a data set, then what it is and the paper."""
    widest = max(len(card.name) for card in cards)
    lines = [f"{'model':<{widest}}  {'parameters':>11}  {'on':<11}  samples of shape"]
    for card in cards:
        fitted = card.fitted
        assert fitted is not None, "every model of the zoo says how large it is"
        kind = "tokens" if fitted.vocabulary is not None else "floats"
        shape = f"{fitted.input_shape} {kind}"
        lines.append(f"{card.name:<{widest}}  {fitted.parameters:>11,}  {fitted.data:<11}  {shape}")
        told = f"{card.summary} {card.paper}."
        lines += _wrapped(told, width, "    ")
    return [*lines, "", f"{len(cards)} models here. Run files for all of them: examples/runs."]


def _elsewhere(others: dict[Package, list[str]], width: int, *, asked: bool) -> list[str]:
    lines: list[str] = []
    for package in PACKAGES.values():
        if package in others:
            lines += ["", f"{len(others[package]):,} of {package.name}:"]
            lines += _wrapped("  ".join(others[package]), width, "  ")
        elif not package.is_installed:
            lines.append(
                f"With {package.name} more, as {package.prefix}:NAME: pip install 'syncline[{package.prefix}]'"
            )
        elif not asked:
            lines.append(f"More from {package.name}, as {package.prefix}:NAME: syncline models --all")
    if others:
        total = len(zoo.names()) + sum(map(len, others.values()))
        lines += ["", f"{total:,} models in all."]
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
