"""What a cell of the survey holds: a figure, the outcome of a check, a quotation, or the reason why there is none.

Here: the four kinds of value, and summing up rounds. Not here: the file that has them (`survey_file.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from syncline.lab.statistics import spread


class Figure(msgspec.Struct, frozen=True, tag="figure", forbid_unknown_fields=True):
    """A number measured in each round; its median and quartiles are written down, too, so that a file can be read."""

    rounds: tuple[float, ...]
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Figure:
        found = spread(rounds)
        if found is None or not all(math.isfinite(value) for value in rounds):
            raise ValueError(f"A figure needs finite rounds, at least one, not {list(rounds)}.")
        return cls(tuple(rounds), found.median, found.low, found.high)

    def with_round(self, value: float) -> Figure:
        return Figure.of([*self.rounds, value])


class Check(msgspec.Struct, frozen=True, tag="check", forbid_unknown_fields=True):
    """Something was tried: whether it held, and what was seen."""

    holds: bool
    seen: str


class Quoted(msgspec.Struct, frozen=True, tag="quoted", forbid_unknown_fields=True):
    """A value that somebody else published."""

    words: str
    source: str
    date: str


class Absent(msgspec.Struct, frozen=True, tag="absent", forbid_unknown_fields=True):
    """Not measurable here; `why` completes "because ..."."""

    why: str


Value = Figure | Check | Quoted | Absent
