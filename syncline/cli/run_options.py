"""Options made from `RunConfig`, so that each setting is declared and described once.

Here: adding one option per field to a command, and the arguments that several commands share. typer reads the options
from a command's signature, so `bundle_options` composes one. Not here: what to train (`task_options.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from syncline.config.run import RunConfig

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print events as JSON lines; the last line is the summary.")]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/lenet-mnist-20260101-120000.")
]

_PANELS = {
    "Speed and memory": (
        "device", "threads", "loaders", "accumulate", "checkpoint_activations", "memory_limit", "tune", "precision",
        "memory_format", "collective", "shared_memory_limit_mb",
    ),
    "Graph networks": ("partition", "halo"),
    "Fault tolerance": (
        "on_worker_failure", "max_failures", "on_nan", "exchange_timeout_s", "checkpoint_every_s",
        "checkpoint_every_steps", "keep_checkpoints",
    ),
    "Run directory": ("out", "name", "shared", "resume", "wait", "data_changed"),
}  # fmt: skip
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}
_SHORT = {"workers": "-w", "epochs": "-e", "batch": "-b"}

Command = Callable[..., Any]


def with_run_options(*, leave_out: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Decorate a command that takes `settings: dict`: it gets an option for each field of RunConfig.

    `settings` holds only what the user gave, so that defaults do not override the values of a run file.
    """
    hints = typing.get_type_hints(RunConfig)
    fields = [f for f in dataclasses.fields(RunConfig) if f.name not in leave_out]
    fields.sort(key=lambda f: [*_PANELS].index(_PANEL_OF[f.name]) if f.name in _PANEL_OF else -1)
    options = {f.name: _annotation(f, hints[f.name]) for f in fields}
    return functools.partial(bundle_options, into="settings", options=options)


def bundle_options(command: Command, *, into: str, options: Mapping[str, Any]) -> Command:
    """`command` with these options, whose values it gets as one dict named `into`; options not given are left out."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != into]

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        values = {name: given.pop(name) for name in options}
        return command(**given, **{into: {name: value for name, value in values.items() if value not in (None, [])}})

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as functools does
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _annotation(field: dataclasses.Field[Any], hint: Any) -> Any:
    name = field.name.replace("_", "-")
    names = [f"--{name}/--no-{name}" if hint is bool else f"--{name}", *filter(None, [_SHORT.get(field.name)])]
    help_text = field.metadata["help"]
    if field.default is not None and hint is not bool:
        help_text += f" Default: {field.default}."
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kind = str if choices else next(t for t in (*typing.get_args(hint), hint) if t is not type(None))
    if choices:
        help_text += f" One of: {', '.join(choices)}."
    panel = _PANEL_OF.get(field.name, "Run")
    return Annotated[kind | None, typer.Option(*names, help=help_text, show_default=False, rich_help_panel=panel)]
