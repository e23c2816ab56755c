"""How many times as many samples a strategy needs as one process, for the same accuracy.

Strategies whose result is that of one process need as many. Of the others only a measurement can say it, and it depends
on the model, the data and the number of workers: a value with a wide range. These are from the published comparison of
all presets, `docs/strategies-table.md`: LeNet on MNIST, 4 workers (hogwild: 2), to 98.5%. It says after which pass over
the data each had reached that, so a strategy with k needed more than k - 1 passes and at most k.

Here: `samples_factor`. Not here: weighing it against speed (`auto.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from syncline.planning.cost.ranges import Range
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy

MEASURED = "measured with LeNet on MNIST, 4 workers"
"""Where the factors are from, for what is said of a choice."""
_PASSES = {
    "allreduce": 2, "server-async": 2, "downpour": 4, "ssp": 2, "sparknet": 2, "iterative-reduce": 2, "hogwild": 3,
    "h2o": 2, "onebit": 2, "bmuf": 3, "easgd": 2, "nexus": 3, "gossip": 2, "ltfb": 4, "diloco": 3,
}  # fmt: skip
"""By preset: the pass in which it reached the accuracy."""


def samples_factor(strategy: str, *, is_exact: bool) -> Range | None:
    """The factor, with its range; None if nobody has measured it."""
    if is_exact:
        return Range.exactly(1.0)
    return _by_text().get(str(read_strategy(strategy)))


@functools.cache
def _by_text() -> Mapping[str, Range]:
    usual = _PASSES["allreduce"]
    found = {}
    for name, passes in _PASSES.items():
        preset = PRESETS[name.replace("-", "_")]
        mid = (passes - 0.5) / (usual - 0.5)
        found[str(preset.make())] = Range((passes - 1) / usual, mid, passes / (usual - 1))
    return found
