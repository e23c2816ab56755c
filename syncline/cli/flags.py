"""Flags made from `RunConfig`, so that each setting is declared and described once.

Here: giving a command one option per field of the configuration. typer reads a command's options from its signature;
the signature is put together here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from syncline.config.run import RunConfig

__all__ = ["with_run_options"]

_PANELS = {
    "checkpoint_every_s": "Checkpoints", "checkpoint_every_steps": "Checkpoints", "keep_checkpoints": "Checkpoints",
    "resume": "Checkpoints", "out": "Checkpoints", "name": "Checkpoints",
    "device": "Machine", "threads": "Machine", "loaders": "Machine", "collective": "Machine",
    "shared_memory_limit_mb": "Machine", "memory_limit": "Machine", "checkpoint_activations": "Machine",
    "exchange_timeout_s": "Machine", "engine": "Machine",
}  # fmt: skip
_SHORT = {"workers": "-w", "epochs": "-e", "batch": "-b"}


def with_run_options(*, leave_out: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command that takes `settings: dict`: it gets an option for each field of RunConfig.

    `settings` holds only what the user gave, so that a run file's values are not overwritten by defaults.
    """
    hints = typing.get_type_hints(RunConfig)
    fields = [f for f in dataclasses.fields(RunConfig) if f.name not in leave_out]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]

        @functools.wraps(command)
        def wrapped(**given: Any) -> Any:
            settings = {f.name: given.pop(f.name) for f in fields}
            return command(**given, settings={k: v for k, v in settings.items() if v is not None})

        options = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(f, hints[f.name])
            )
            for f in fields
        ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as functools does
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _annotation(field: dataclasses.Field[Any], hint: Any) -> Any:
    name = field.name.replace("_", "-")
    names = [f"--{name}/--no-{name}" if hint is bool else f"--{name}", *filter(None, [_SHORT.get(field.name)])]
    help_text = field.metadata["help"]
    if field.default is not None and hint is not bool:
        help_text += f" Default: {field.default}."
    options = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kind = str if options else next(t for t in (*typing.get_args(hint), hint) if t is not type(None))
    if options:
        help_text += f" One of: {', '.join(options)}."
    panel = _PANELS.get(field.name, "Run")
    return Annotated[kind | None, typer.Option(*names, help=help_text, show_default=False, rich_help_panel=panel)]
