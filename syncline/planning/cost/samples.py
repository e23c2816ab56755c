"""How many times as many samples a strategy needs as one process, for the same accuracy.

Strategies whose result is that of one process need as many. Of the others only a measurement can say it, and it depends
on the model, the data and the number of workers: a value with a wide range. These were measured with the presets as
they are (`benchmarks/samples/measure.py`): LeNet on a tenth of MNIST, SGD with momentum, batch size 64, 4 workers, to
96.5% accuracy, three seeds.

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
_UNSURE = 0.15
"""What another model may change, beyond what differed between seeds."""
_SEEN: dict[str, tuple[float, float, float]] = {}
"""By preset: the smallest, the median and the largest of the seeds."""


def samples_factor(strategy: str, *, is_exact: bool) -> Range | None:
    """The factor, with its range; None if nobody has measured it."""
    if is_exact:
        return Range.exactly(1.0)
    return _by_text().get(str(read_strategy(strategy)))


@functools.cache
def _by_text() -> Mapping[str, Range]:
    found = {}
    for name, (low, mid, high) in _SEEN.items():
        preset = PRESETS[name.replace("-", "_")]
        found[str(preset.make())] = Range(low * (1 - _UNSURE), mid, high * (1 + _UNSURE))
    return found
