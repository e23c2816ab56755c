"""`syncline list`: everything that has a name. Not here: where the names come from (`models/catalog/`)."""

from __future__ import annotations

import json as json_format
import shutil
import textwrap
from typing import Annotated

import typer

from syncline.cli.kinds import KINDS, everything
from syncline.errors import did_you_mean

_NARROWEST, _WIDEST = 60, 120
_LONGEST_NAME = 28


def list_names(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}. Default: the number of each.")
    ] = None,
    filter: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="Only entries whose name or description contains this.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the names for run files and options: layers, losses, optimizers, metrics and more.

    syncline list
    syncline list layers
    syncline list layers pool
    """
    if kind is None:
        for each in KINDS:
            count = len(everything(each))
            typer.echo(json_format.dumps({"kind": each, "count": count}) if json else f"{count:6,}  {each}")
        return
    found = everything(kind)
    shown = {n: s for n, s in found.items() if filter is None or filter.lower() in f"{n} {s}".lower()}
    if json:
        for name, sentence in shown.items():
            typer.echo(json_format.dumps({"name": name, "summary": sentence}))
        return
    for line in _lines(shown):
        typer.echo(line)
    if filter is None:
        typer.echo(f"{len(found):,} {kind}")
        return
    close = "" if shown else did_you_mean(filter, found)
    typer.echo(f"{len(shown):,} of {len(found):,} {kind} contain {filter!r}. {close}".rstrip())


def _lines(found: dict[str, str]) -> list[str]:
    """A name, and beside it its description on one or more lines."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    room = min(max((len(name) for name in found), default=0), _LONGEST_NAME) + 2
    lines: list[str] = []
    for name, sentence in found.items():
        parts = textwrap.wrap(sentence, width - room, break_on_hyphens=False) or [""]
        if len(name) + 2 > room:
            lines.append(name)
            lines += [" " * room + part for part in parts if part]
        else:
            lines += [f"{name:<{room}}{parts[0]}".rstrip(), *(" " * room + part for part in parts[1:])]
    return lines
