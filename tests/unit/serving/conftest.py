"""The server of these tests."""

from __future__ import annotations

import pytest
from server_world import World


@pytest.fixture
def world():
    made: list[World] = []

    def make(*arguments, **options) -> World:
        made.append(World(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
