"""Generates the command reference from `syncline COMMAND --help` when the site is built.

Here: from a command's description to Markdown. Not here: the commands (`syncline/cli`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from syncline.cli.main import app

PAGE = "reference/commands.md"
_INTRODUCTION = "# Commands\n\nThe same text as `syncline COMMAND --help`."
_IS_EXAMPLE = re.compile(r"(sudo |[A-Z_]+=\S+ )*syncline ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs after it has collected the pages."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Every command and its subcommands, in the order of `syncline --help`."""
    return "\n\n".join([_INTRODUCTION, *(_section(name, command) for name, command in commands())]) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its whole name, such as `syncline cluster up`."""
    yield from _below("syncline", typer.main.get_command(app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    if command.invoke_without_command:  # a command of its own as well, such as `syncline survey`
        yield name, command
    for word, subcommand in inner.items():
        if not subcommand.hidden:
            yield from _below(f"{name} {word}", subcommand)


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([name, *map(_placeholder, arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## {name}", f"```text\n{usage}\n```", _described(command.help or "")]
    if command.epilog:
        parts.append(_described(command.epilog))
    if arguments:
        parts.append(_table("argument", [(f"`{_placeholder(p)}`", p.help) for p in arguments]))
    panels = dict.fromkeys(p.rich_help_panel or "option" for p in options)
    for panel in panels:
        parts.append(_table(panel, [(_names(p), p.help) for p in options if (p.rich_help_panel or "option") == panel]))
    return "\n\n".join(parts)


def _placeholder(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    repeated = f"{word}..." if argument.nargs == -1 and not word.endswith("...") else word
    return repeated if argument.required else f"[{repeated}]"


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _described(text: str) -> str:
    """The help text, with its examples as code blocks."""
    blocks = []
    for is_example, lines in itertools.groupby(text.splitlines(), lambda line: bool(_IS_EXAMPLE.match(line))):
        body = "\n".join(lines)
        blocks.append(f"\n```sh\n{body}\n```\n" if is_example else body)
    return "\n".join(blocks)


def _table(first_column: str, rows: list[tuple[str, str | None]]) -> str:
    lines = [f"| {first_column} | |", "|---|---|"]
    lines += [f"| {name} | {_in_a_cell(help_text or '')} |" for name, help_text in rows]
    return "\n".join(lines)


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
