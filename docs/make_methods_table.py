"""Writes the table of methods in docs/strategies.md from what the methods declare: python docs/make_methods_table.py"""

from __future__ import annotations

import re
from pathlib import Path

from syncline.strategies.method import AnswersMethod
from syncline.strategies.table import METHODS

PAGE = Path(__file__).with_name("strategies.md")
_MARKS = re.compile(r"(<!-- methods: begin -->\n).*?(<!-- methods: end -->)", re.DOTALL)


def table() -> str:
    """A row for each method."""
    rows = ["| method | answers | needs | in a hierarchy |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, METHODS)]) + "\n"


def _row(method: type[AnswersMethod]) -> str:
    served = method.serves()
    answers = " \\| ".join(" or ".join(kind.__name__.lower() for kind in kinds) for kinds in served.values())
    needs = [
        "lock-step" if method.is_lock_step is True else "",
        "shared memory" if method.needs_shared_memory else "",
        "parameter servers" if "server" in answers else "",
        f"{method.min_workers} workers" if method.min_workers > 1 else "",
    ]
    fits = [
        "inside a host" if method.fits_inside_group else "",
        "across hosts" if method.fits_across_groups else "",
    ]
    name = f"`{method.__module__.rpartition('.')[2]}`"
    return f"| {name} | `{answers}` | {_listed(needs)} | {_listed(fits)} |"


def _listed(parts: list[str]) -> str:
    return ", ".join(filter(None, parts)) or "-"


def page(text: str) -> str:
    """The page with the table as it is now."""
    return _MARKS.sub(lambda found: found[1] + table() + found[2], text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
