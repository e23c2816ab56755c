"""What a layout is made of: `LayoutPart`, one way of spreading a replica over workers.

Here: what each part declares, and how its arguments are checked. Free of torch: the planner reads layouts before any
process starts. Not here: the parts (`sharded.py`, `pipeline.py`, `tensor.py`), and their products (`layout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.layouts.layout import Layout


@dataclass(frozen=True)
class LayoutPart:
    """One way of spreading a replica over `n` workers."""

    name: ClassVar[str]
    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 2):
            raise invalid(self.name, f"n={self.n!r}", "it needs a number of workers, 2 or more")

    def __str__(self) -> str:
        given = [
            f"{field.name}={value}" if field.name != "n" else str(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != (field.default if field.name != "n" else None)
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def __mul__(self, other: LayoutPart | Layout) -> Layout:
        from syncline.layouts.layout import Layout

        return Layout.of(self, *(other.parts if isinstance(other, Layout) else (other,)))

    def explain(self, grid: Any, parameter_bytes: int) -> list[str]:
        """What `syncline explain` says about it, for the workers of `grid`."""
        raise NotImplementedError


def invalid(layout: str, argument: str, why: str, *, nearest: str | None = None) -> ConfigError:
    """The error for an argument that a layout does not take."""
    nearest = nearest or f"{layout}(2)"
    return ConfigError(
        f'--layout {layout}({argument}) is not possible: {why}. For instance: --layout "{nearest}".',
        code="layout",
        layout=layout,
        reason="argument",
        nearest=nearest,
    )
