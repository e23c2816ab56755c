"""Which numbers of a model each worker owns, when its parameters lie one after another in a flat vector.

Here: pure functions of sizes. Gradients are summed in rounds, from the end of the vector to its beginning, as a
backward pass completes them; each worker owns an equal part of every round. Not here: the memory (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline.compute.partition import split


class Range(NamedTuple):
    """Numbers of the flat vector, without the last."""

    low: int
    high: int


class Piece(NamedTuple):
    """A part of one parameter."""

    parameter: int
    low: int
    high: int


class SumRound(NamedTuple):
    """What is summed at a time."""

    whole: Range
    parameters: range
    """The parameters that have a part in it."""

    def owned(self, rank: int, size: int) -> Range:
        """The part of one worker."""
        low, high = split(self.whole.high - self.whole.low, size)[rank]
        return Range(self.whole.low + low, self.whole.low + high)


def rounds_of(sizes: Sequence[int], limit: int) -> list[SumRound]:
    """The rounds for parameters of these sizes, each of up to `limit` numbers."""
    starts = _starts(sizes)
    rounds = []
    for high in range(starts[-1], 0, -limit):
        whole = Range(max(0, high - limit), high)
        touched = [n for n in range(len(sizes)) if starts[n] < whole.high and starts[n + 1] > whole.low and sizes[n]]
        rounds.append(SumRound(whole, range(touched[0], touched[-1] + 1)))
    return rounds


def pieces_of(sizes: Sequence[int], rounds: Sequence[SumRound], rank: int, size: int) -> list[Piece]:
    """What one worker owns, parameter by parameter."""
    starts = _starts(sizes)
    pieces = []
    for round in rounds:
        low, high = round.owned(rank, size)
        for n in round.parameters:
            first, last = max(low, starts[n]), min(high, starts[n + 1])
            if first < last:
                pieces.append(Piece(n, first, last))
    return sorted(pieces)


def chunks_of(pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    """The pieces in the order of updating, in chunks of up to `limit` numbers; larger pieces are cut."""
    chunks: list[list[Piece]] = []
    room = 0
    for parameter, low, high in pieces:
        while low < high:
            if not room:
                chunks.append([])
                room = limit
            taken = min(room, high - low)
            chunks[-1].append(Piece(parameter, low, low + taken))
            low, room = low + taken, room - taken
    return chunks


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts
