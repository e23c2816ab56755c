"""Which numbers of a model each worker owns, when its parameters lie one after another in a flat vector.

Here: pure functions of sizes. A lane (`grid.py`) computes the gradients of some parameters, or of parts of them: its
*leaves*. It sums them in rounds, from the last leaf to the first, as a backward pass completes them; each of its shards
owns an equal part of every round. Not here: the memory (`shared_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline.compute.partition import split


class Range(NamedTuple):
    """Numbers of the flat vector, without the last."""

    low: int
    high: int


class Leaf(NamedTuple):
    """A parameter, or a part of one, whose gradient a lane computes: numbers of the flat vector."""

    parameter: int
    low: int
    high: int


class Piece(NamedTuple):
    """A part of one parameter that a worker owns: numbers of the flat vector."""

    parameter: int
    low: int
    high: int
    gradient: int
    """Where its gradients begin in the vector of summed gradients, in which the leaves of each lane are together."""


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


def whole_leaves(sizes: Sequence[int]) -> list[Leaf]:
    """All parameters, as the leaves of a single lane."""
    starts = _starts(sizes)
    return [Leaf(n, starts[n], starts[n + 1]) for n in range(len(sizes))]


def sizes_of(leaves: Sequence[Leaf]) -> list[int]:
    return [leaf.high - leaf.low for leaf in leaves]


def pieces_of(
    leaves: Sequence[Leaf], rounds: Sequence[SumRound], shard: int, shards: int, first: int = 0
) -> list[Piece]:
    """What one shard of a lane owns, leaf by leaf; the lane's summed gradients begin at `first`."""
    starts = _starts(sizes_of(leaves))
    pieces = []
    for round in rounds:
        low, high = round.owned(shard, shards)
        for n in round.parameters:
            begin, end = max(low, starts[n]), min(high, starts[n + 1])
            if begin < end:
                at = leaves[n].low - starts[n]
                pieces.append(Piece(leaves[n].parameter, at + begin, at + end, first + begin))
    return sorted(pieces)


def pieces_by_rank(lanes: Sequence[Sequence[Leaf]], shards: int, limit: int) -> list[list[Piece]]:
    """What each worker of a replica owns, in the order of their ranks: shard by shard, and in it lane by lane."""
    firsts = _starts([sum(sizes_of(leaves)) for leaves in lanes])
    rounds = [rounds_of(sizes_of(leaves), limit) for leaves in lanes]
    return [
        pieces_of(leaves, rounds[lane], shard, shards, firsts[lane])
        for shard in range(shards)
        for lane, leaves in enumerate(lanes)
    ]


def chunks_of(pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    """The pieces in the order of updating, in chunks of up to `limit` numbers; larger pieces are cut."""
    chunks: list[list[Piece]] = []
    room = 0
    for parameter, low, high, gradient in pieces:
        while low < high:
            if not room:
                chunks.append([])
                room = limit
            taken = min(room, high - low)
            chunks[-1].append(Piece(parameter, low, low + taken, gradient))
            low, gradient, room = low + taken, gradient + taken, room - taken
    return chunks


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts
