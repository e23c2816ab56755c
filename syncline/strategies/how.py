"""The fourth question: how is it encoded? Answers as data; the mathematics is in `comms/codecs/`.

The lossy answers keep what they could not send and add it to the next exchange (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.comms.codecs import Codec
    from syncline.comms.collective import Collective
    from syncline.strategies.reducers import Reducer

__all__ = ["BF16", "Exact", "How", "Int8", "OneBit", "PowerSGD", "TopK", "WithCodec"]


class _Codec:
    """An encoding as one payload, by the codec of the same name and settings: `Int8` by `Int8Codec`."""

    def codec(self) -> Codec:
        from syncline.comms import codecs

        made: Codec = getattr(codecs, f"{type(self).__name__}Codec")(**vars(self))
        return made

    def reducer(self, collective: Collective, shapes: Sequence[Sequence[int]], seed: int) -> Reducer:
        """Sums flat tensors that are made of parameters of these `shapes`, encoded, over all workers."""
        from syncline.strategies.reducers import CodecReducer

        del shapes, seed
        return CodecReducer(None if self == Exact() else self.codec(), collective)

    def wire_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """How many bytes tensors of these shapes take, encoded as one."""
        return self.codec().wire_bytes(sum(math.prod(shape) for shape in shapes))


@dataclass(frozen=True)
class Exact(_Codec):
    """As it is: 4 bytes per number."""


@dataclass(frozen=True)
class BF16(_Codec):
    """Rounded to 16 bits: 2 times smaller."""


@dataclass(frozen=True)
class Int8(_Codec):
    """8 bits per number and a scale for each block: 3.9 times smaller."""


@dataclass(frozen=True)
class OneBit(_Codec):
    """The sign and two values for each block (Seide et al. 2014): 30 times smaller."""


@dataclass(frozen=True)
class TopK(_Codec):
    """Only the largest `fraction` of the numbers, with their places."""

    fraction: float = 0.01

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, (int, float)) and math.isfinite(self.fraction)
        if not is_number or not 0 < self.fraction <= 1:
            raise ConfigError(f"TopK({self.fraction!r}): the fraction must be more than 0 and at most 1, such as 0.01.")


@dataclass(frozen=True)
class PowerSGD:
    """Each matrix as the product of two thin ones (Vogels et al. 2019); all workers sum the one, then the other.

    There is no codec for it: the second message follows from the sum of the first.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(
                f"PowerSGD({self.rank!r}): the rank, which is how many columns the thin matrices have, must be 1 or "
                "more; 1 to 4 is usual."
            )

    def reducer(self, collective: Collective, shapes: Sequence[Sequence[int]], seed: int) -> Reducer:
        """Sums flat tensors that are made of parameters of these `shapes`, encoded, over all workers."""
        from syncline.strategies.reducers import PowerSGDReducer

        return PowerSGDReducer(self.rank, shapes, collective, seed)

    def wire_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """How many bytes tensors of these shapes take; only matrices become two thin ones."""
        from syncline.comms import codecs

        return codecs.powersgd.cut(shapes, self.rank).wire_bytes


WithCodec = Exact | BF16 | Int8 | OneBit | TopK
"""Encodings that can be sent to one other process; PowerSGD needs sums over all workers."""
How = WithCodec | PowerSGD
