"""Tables that commands print."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from syncline.strategies.presets import PRESETS

__all__ = ["strategy_table"]


def strategy_table() -> str:
    """The presets: after which system, their four answers, and the paper."""
    table = Table(title="Strategies by name", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "after", "what | when | whom | how", "paper"):
        table.add_column(heading, overflow="fold", min_width=len(max(PRESETS, key=len)) if heading == "name" else None)
    for preset in PRESETS.values():
        table.add_row(preset.name, preset.after, str(preset.make()), preset.paper)
    stream = io.StringIO()
    Console(file=stream, width=160, highlight=False).print(table)
    return stream.getvalue().rstrip()
