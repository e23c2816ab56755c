"""Tournaments of models: LTFB, "let a thousand flowers bloom" (Jacobs et al. 2017).

Every so often the trainers are paired at random; each sends its model to the other, scores both on data of its own, and
continues with the better one. Good models spread without ever being averaged.

Here: who meets whom, who wins, and how hyperparameters vary afterwards. Pure functions of members, round and seed.
Not here: sending models (`comms`), scoring them (`workers`), and how often (`strategies`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from syncline.comms.mixing import matching


@dataclass(frozen=True)
class Bracket:
    """One round: the pairs, and the rank without a rival (`bye`)."""

    pairs: tuple[tuple[int, int], ...]
    bye: int | None

    def rival_of(self, rank: int) -> int | None:
        """Whom `rank` meets; None if it has the bye."""
        for first, second in self.pairs:
            if rank in (first, second):
                return second if rank == first else first
        if rank != self.bye:
            raise ValueError(f"Rank {rank} is not in this round: {self}.")
        return None


@dataclass(frozen=True, kw_only=True)
class Contested:
    """One rival's view of a contest, and the model that it continues with."""

    round: int
    rival: int
    own_score: float
    rival_score: float
    took_over: bool
    """Whether it continues with its rival's model."""
    hyperparameters: dict[str, float]


def draw(members: Sequence[int], round: int, seed: int) -> Bracket:
    """The pairs of one round, drawn at random, the same on every rank; an odd one out has a bye."""
    pairs, bye = matching(members, round, seed)
    return Bracket(tuple(pairs), bye)


def rival_wins(own: float, rival: float, *, lower_is_better: bool) -> bool:
    """Whether a rank should continue with its rival's model, given both scores.

    A tie goes to the rank's own model, which it would be pointless to replace. NaN loses against every number, also
    against an infinite one; between two NaN, as between any equals, all stay.
    """
    if math.isnan(rival):
        return False
    if math.isnan(own):
        return True
    return rival < own if lower_is_better else rival > own


def perturb(
    hyperparameters: Mapping[str, float],
    *,
    round: int,
    rank: int,
    seed: int,
    factor: float = 1.2,
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, float]:
    """Each hyperparameter times a random number between 1/`factor` and `factor`, kept within its limits if it has any.

    So that ranks with the same model explore different directions, as in population-based training (Jaderberg et
    al. 2017). The logarithm of the factor is uniform around zero: in the long run nothing drifts up or down by itself.
    A value of one name does not depend on which others there are. Give limits to what must stay below 1, as a momentum.
    """
    if not 1 <= factor < math.inf:
        raise ValueError(f"The factor of a perturbation is {factor}, but it must be at least 1; 1.2 is usual.")
    perturbed = {}
    for name, value in hyperparameters.items():
        place = np.random.SeedSequence([seed, round, rank, zlib.crc32(name.encode())])
        exponent = float(np.random.RandomState(np.random.MT19937(place)).uniform(-1.0, 1.0))
        low, high = (limits or {}).get(name, (-math.inf, math.inf))
        perturbed[name] = min(max(value * factor**exponent, low), high)
    return perturbed
