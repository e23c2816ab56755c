"""Which differences between frameworks are shown by the rounds, and which are not. Pure.

A framework is shown to be better than another one only if every round of the one is better than every round of the
other, on every machine that measured both, and the medians differ by at least `MARGIN`: on a shared machine, the same
program varied by that much from run to run. Here: `better_than` and `standing`. Not here: how it is said (`text.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from syncline.lab.survey.values import Figure

MARGIN = 1.3
_LEAST_ROUNDS = 2


class Standing(NamedTuple):
    """The framework with the best median, those it is shown to be better than, and those it is not."""

    best: str
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]


def better_than(one: Figure, other: Figure, better: Literal["more", "less"]) -> bool:
    """Whether the rounds show it."""
    if min(len(one.rounds), len(other.rounds)) < _LEAST_ROUNDS:
        return False
    if better == "less":
        return max(one.rounds) < min(other.rounds) and one.median * MARGIN <= other.median
    return min(one.rounds) > max(other.rounds) and one.median >= MARGIN * other.median


def standing(machines: Sequence[Mapping[str, Figure]], better: Literal["more", "less"]) -> Standing | None:
    """Over the figures of one column, by framework, of each machine; None without two frameworks to compare."""
    names = {name for figures in machines for name in figures}
    if len(names) < 2:
        return None
    best = _leader(machines, names, better)
    others = sorted(names - {best})
    shown = [name for name in others if _is_shown(machines, best, name, better)]
    return Standing(best, tuple(shown), tuple(name for name in others if name not in shown))


def _leader(machines: Sequence[Mapping[str, Figure]], names: set[str], better: Literal["more", "less"]) -> str:
    """The one that is shown to be better than most others; on a tie the best median on the first machine."""

    def place(name: str) -> tuple[int, float, str]:
        wins = sum(_is_shown(machines, name, other, better) for other in names - {name})
        median = next(figures[name].median for figures in machines if name in figures)
        return (-wins, median if better == "less" else -median, name)

    return min(names, key=place)


def _is_shown(machines: Sequence[Mapping[str, Figure]], one: str, other: str, better: Literal["more", "less"]) -> bool:
    both = [figures for figures in machines if one in figures and other in figures]
    return bool(both) and all(better_than(figures[one], figures[other], better) for figures in both)
