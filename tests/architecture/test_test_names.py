"""Test files are imported by their bare names, so no two of them may share one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_no_two_test_files_have_the_same_name():
    """Pytest would refuse the second one, but only in a process that has imported the first."""
    counted = Counter(path.name for path in TESTS.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert counted
    assert [name for name, number in counted.items() if number > 1] == []
