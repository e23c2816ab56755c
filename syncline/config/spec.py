"""A name with options: `sgd(lr=0.1, momentum=0.9)`.

Here: `Spec`, its text form and its TOML form. Not here: what the names mean; models, losses, optimizers and strategies
look up their own.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import ConfigError

__all__ = ["Spec", "literal"]


@dataclass(frozen=True)
class Spec:
    """A name with options.

    >>> Spec.parse("sgd(lr=0.1, nesterov=True)")
    Spec(name='sgd', options={'lr': 0.1, 'nesterov': True})
    >>> str(Spec("mlp", {"hidden": (64, 32)}))
    'mlp(hidden=(64, 32))'
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """From `name` or `name(option=value, ...)`, with Python literals as values."""
        mistake = f"{text!r} is not valid. Use a name such as 'sgd', or a name with options such as 'sgd(lr=0.1)'."
        head, bracket, _ = text.strip().partition("(")
        # Names may hold dashes and colons ('server-sync', 'timm:resnet50'), which Python's grammar would not take.
        if not head.strip() or any(c.isspace() for c in head.strip()):
            raise ConfigError(mistake, code="invalid-spec", text=text)
        if not bracket:
            return cls(head.strip())
        try:
            call = ast.parse("f" + text.strip()[len(head) :], mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                raise ConfigError(mistake, code="invalid-spec", text=text)
            if call.args or any(k.arg is None for k in call.keywords):
                raise ConfigError(f"{mistake} Every option needs a name.", code="invalid-spec", text=text)
            options = {str(k.arg): literal(k.value) for k in call.keywords}
        except ConfigError:
            raise
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ConfigError(mistake, code="invalid-spec", text=text) from error
        if len(options) < len(call.keywords):
            raise ConfigError(f"{mistake} An option is given twice.", code="invalid-spec", text=text)
        return cls(head.strip(), options)

    @classmethod
    def of(cls, value: object, *, what: str) -> Spec:
        """From a Spec, a string, or a mapping with a `name`, as in a TOML table."""
        if isinstance(value, Spec):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            if not isinstance(value.get("name"), str):
                raise ConfigError(f'The table [{what}] needs a name: name = "...".', code="missing-name", setting=what)
            return cls(value["name"], {k: _frozen(v) for k, v in value.items() if k != "name"})
        raise ConfigError.for_setting(what, value, "a name, 'name(option=value)', or a table with a name")

    def with_options(self, **options: Any) -> Spec:
        """A copy with some options set."""
        return Spec(self.name, {**self.options, **options})

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def literal(node: ast.expr) -> Any:
    """A plain value as Python prints it, including `inf` and `nan`; `ValueError` otherwise."""
    return ast.literal_eval(_Infinities().visit(node))


class _Infinities(ast.NodeTransformer):
    """Reads `inf` and `nan` as Python prints them; its grammar has no literals for them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Other names are rejected by literal_eval."""
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value
