"""Renders the public API as text: names, signatures and fields. Run it to rewrite the snapshot (`make api`)."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator

import syncline

LINE = 110  # longer signatures have one parameter per line, so that a diff shows the one that changed


def rendered() -> str:
    """One line for each public name, followed by the public members of classes."""
    return "\n".join(line for name in sorted(syncline.__all__) for line in _lines(name, getattr(syncline, name))) + "\n"


def _lines(name: str, thing: object) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield f"{name}{_signature(thing)}" if callable(thing) else f"{name}: {type(thing).__name__}"
        return
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    if not issubclass(thing, enum.Enum) and not getattr(thing, "_is_protocol", False):
        yield f"    __init__{_signature(thing)}"
    for member in sorted(_members(thing)):
        value = inspect.getattr_static(thing, member, None)
        if isinstance(value, property):
            yield f"    {member}: property"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"    {type(value).__name__} {member}{_signature(getattr(thing, member))}"
        elif inspect.isfunction(value):
            yield f"    {member}{_signature(value)}"
        else:
            yield f"    {member}"


def _members(thing: type) -> set[str]:
    """Those that our own classes define; what a base from elsewhere brings is not our promise."""
    ours = [base for base in thing.__mro__ if base.__module__.split(".")[0] == "syncline"]
    names = {name for base in ours for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    return {name for name in names - fields if not name.startswith("_")}


def _signature(thing: object) -> str:
    try:
        found = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    shown = [p.replace(default=_Named(p.default)) if _has_address(p.default) else p for p in found.parameters.values()]
    line = str(found.replace(parameters=shown))
    if len(line) <= LINE:
        return line
    returned = "" if found.return_annotation is found.empty else f" -> {found.return_annotation!r}"
    only_named = next((k for k, p in enumerate(shown) if p.kind is p.KEYWORD_ONLY), None)
    lines = [str(p) for p in shown]
    if only_named is not None and not any(p.kind is p.VAR_POSITIONAL for p in shown):
        lines.insert(only_named, "*")
    return "(\n" + "".join(f"        {line},\n" for line in lines) + f"    ){returned}"


def _has_address(default: object) -> bool:
    return default is not inspect.Parameter.empty and (" at 0x" in repr(default) or inspect.isroutine(default))


class _Named:
    """A default whose repr would differ from run to run."""

    def __init__(self, default: object) -> None:
        self._name = getattr(default, "__qualname__", type(default).__name__)

    def __repr__(self) -> str:
        return f"<{self._name}>"


if __name__ == "__main__":
    print(rendered(), end="")
