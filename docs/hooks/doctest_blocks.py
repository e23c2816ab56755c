"""Shows examples in docstrings as code; mkdocstrings would render their `>>>` as quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*\n?(?:^\S.*\n?)*", re.M)
_DIRECTIVE = re.compile(r" *# doctest: .*$", re.M)


class DoctestBlocks(Extension):
    """Called by mkdocstrings for every object."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)


def with_blocks(docstring: str) -> str:
    """The docstring with its examples as code blocks, without doctest directives."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{_DIRECTIVE.sub('', found[0]).rstrip()}\n```\n", docstring)
