"""The public API changes only on purpose."""

from __future__ import annotations

import difflib
from pathlib import Path

from public_api import rendered

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def test_names_and_signatures_are_those_of_the_snapshot():
    now, then = rendered().splitlines(), SNAPSHOT.read_text().splitlines()
    difference = "\n".join(difflib.unified_diff(then, now, "public_api.txt", "the package", lineterm=""))
    assert not difference, (
        f"The public API differs from its snapshot. If that is intended, run `make api`.\n{difference}"
    )
