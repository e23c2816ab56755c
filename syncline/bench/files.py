"""What remains of a bench: its report as files. Not here: what they say (`report.py`, `html.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from syncline.bench.html import as_html
from syncline.bench.report import Report, as_dict, as_markdown

__all__ = ["write"]


def write(report: Report, folder: Path) -> None:
    """`bench.html` and `bench.md` for people, `bench.json` for programs."""
    (folder / "bench.html").write_text(as_html(report), encoding="utf-8")
    (folder / "bench.md").write_text(as_markdown(report), encoding="utf-8")
    (folder / "bench.json").write_text(json.dumps(as_dict(report), indent=1) + "\n", encoding="utf-8")
