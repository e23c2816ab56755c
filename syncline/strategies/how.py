"""The fourth question: how is it encoded? Answers as data; the mathematics is in `algorithms/codecs/`.

The lossy answers keep what they could not send and add it to the next exchange (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.algorithms.codecs import Codec
    from syncline.algorithms.codecs.powersgd import Cut

__all__ = ["BF16", "Exact", "How", "Int8", "OneBit", "PowerSGD", "TopK"]


@dataclass(frozen=True)
class Exact:
    """As it is: 4 bytes a number."""

    def codec(self) -> Codec:
        """The codec that does it."""
        from syncline.algorithms import codecs

        return codecs.Exact()


@dataclass(frozen=True)
class BF16:
    """Rounded to 16 bits: 2 times smaller."""

    def codec(self) -> Codec:
        """The codec that does it."""
        from syncline.algorithms import codecs

        return codecs.BF16()


@dataclass(frozen=True)
class Int8:
    """8 bits a number and a scale for each block: 3.9 times smaller."""

    def codec(self) -> Codec:
        """The codec that does it."""
        from syncline.algorithms import codecs

        return codecs.Int8()


@dataclass(frozen=True)
class OneBit:
    """The sign and two values for each block (Seide et al. 2014): 30 times smaller."""

    def codec(self) -> Codec:
        """The codec that does it."""
        from syncline.algorithms import codecs

        return codecs.OneBit()


@dataclass(frozen=True)
class TopK:
    """Only the largest `fraction` of the numbers, with their places."""

    fraction: float = 0.01

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, (int, float)) and math.isfinite(self.fraction)
        if not is_number or not 0 < self.fraction <= 1:
            raise ConfigError(f"TopK({self.fraction!r}): the fraction must be more than 0 and at most 1, such as 0.01.")

    def codec(self) -> Codec:
        """The codec that does it."""
        from syncline.algorithms import codecs

        return codecs.TopK(self.fraction)


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

    def cut(self, shapes: Sequence[Sequence[int]]) -> Cut:
        """Which of the parameters with these shapes are sent as two thin matrices, and which as they are."""
        from syncline.algorithms import codecs

        return codecs.PowerSGD(self.rank).cut(shapes)


How = Exact | BF16 | Int8 | OneBit | TopK | PowerSGD
