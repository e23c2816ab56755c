"""Finding an object by name, checking its options, constructing it.

Here: what all kinds share. Not here: the tables of names (one file per kind).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from syncline.config.spec import Spec
from syncline.errors import ConfigError, UnknownName, check_options


def key(name: str) -> str:
    """`CrossEntropy`, `cross_entropy` and `cross-entropy` are one name."""
    return name.lower().replace("_", "").replace("-", "")


def find(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry called `name`, ignoring case, - and _; `UnknownName` if there is none."""
    if name in table:
        return table[name]
    by_key = {key(n): thing for n, thing in table.items()}
    found = by_key.get(key(name))
    if found is None:
        raise UnknownName.among(kind, name, table)
    return found


def subclasses_in(module: Any, base: type) -> dict[str, Any]:
    """The public classes of a module that are a `base`, by name."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if name[0] != "_" and inspect.isclass(thing) and issubclass(thing, base) and thing is not base
    }


def check_accepts(function: Callable[..., Any], spec: Spec, skip: Iterable[str] = ()) -> None:
    """Raise `UnknownName` for an option that `function` does not accept."""
    known = [n for n in inspect.signature(function).parameters if n not in (*skip, "self", "params", "optimizer")]
    check_options(spec.name, spec.options, known)


def construct(kind: str, found: Callable[..., Any], spec: Spec, arguments: tuple[Any, ...]) -> Any:
    """`found(*arguments, **options)`; `ConfigError` if that fails."""
    check_accepts(found, spec)
    try:
        return found(*arguments, **spec.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Cannot create the {kind} {spec}: {error}.") from error


def summary_of(thing: Any) -> str:
    """The first sentence of a docstring, without its markup."""
    text = inspect.cleandoc(thing.__doc__ or "")  # only its own, since an inherited one describes the base class
    for paragraph in re.split(r"\n\s*\n", text):
        plain = _without_markup(paragraph)
        if plain and not plain.startswith((".. ", "Args", ">>>", "__init__")):
            return re.split(r"(?<=[a-z)\]])\.(?:\s|$)", plain)[0].rstrip(".:") + "."
    return ""


def _without_markup(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`<]*?)(?:\s*<[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]*?)\s*<[^`]*>`_+", r"\1", text)
    text = re.sub(r"\\(?:text|operatorname|mathcal)\{([^}]*)\}", r"\1", text)
    text = re.sub(r"`_+|(?<=\w)_+(?=[\s.,)]|$)", "", text)
    return " ".join(text.replace("`", "").replace("\\", "").split())
