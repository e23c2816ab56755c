"""A name with arguments, in text form: `conv2d(20, 5, padding=2)`.

Here: `Call`, its text form and its TOML form. Like `config/spec.py`, but with positional arguments too.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import ConfigError


@dataclass(frozen=True)
class Call:
    """A name with arguments.

    >>> Call.parse("conv2d(20, 5, padding=2)")
    Call(name='conv2d', arguments=(20, 5), options={'padding': 2})
    >>> str(Call("l2", (0.001,)))
    'l2(0.001)'
    """

    name: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Call:
        """From `name` or `name(value, option=value, ...)`, with Python literals as values."""
        mistake = f"Cannot read {text!r}: write a name such as 'relu', or one with arguments such as 'conv2d(20, 5)'."
        head, bracket, _ = text.strip().partition("(")
        name = head.strip()
        if not name or any(c.isspace() or c in "'\"=,)" for c in name):
            raise ConfigError(mistake)
        if not bracket:
            return cls(name)
        try:
            call = ast.parse("f" + text.strip()[len(head) :], mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                raise ConfigError(mistake)
            arguments = tuple(frozen(ast.literal_eval(a)) for a in call.args)
            options = {str(k.arg): frozen(ast.literal_eval(k.value)) for k in call.keywords if k.arg is not None}
        except ConfigError:
            raise
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ConfigError(mistake) from error
        if len(options) < len(call.keywords):
            raise ConfigError(f"{mistake} An option is given twice, or has no name.")
        return cls(name, arguments, options)

    @classmethod
    def of(cls, value: object, *, what: str) -> Call:
        """From a Call, a text, or a table with a `name`."""
        if isinstance(value, Call):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            options = {k: frozen(v) for k, v in value.items() if k != "name"}
            return cls.parse(value["name"]).with_options(**options)
        raise ConfigError(f"{what} is {value!r}. Write a name, 'name(value)', or a table with a name.")

    def with_options(self, **options: Any) -> Call:
        """A copy with some options set."""
        return Call(self.name, self.arguments, {**self.options, **options})

    def __str__(self) -> str:
        inside = [*map(repr, self.arguments), *(f"{k}={v!r}" for k, v in self.options.items())]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def frozen(value: Any) -> Any:
    """Lists as tuples, to be immutable and hashable."""
    return tuple(frozen(v) for v in value) if isinstance(value, (list, tuple)) else value
