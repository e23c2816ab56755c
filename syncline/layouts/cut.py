"""Where to cut a chain of units into pipeline stages.

Here: `best_cut`, which minimizes the predicted time of a step, `cut_evenly` and `cut_at`, and what they predict. Pure
functions of costs. Not here: measuring costs (`stage_costs.py`), running stages.

A step has m micro-batches, each of which passes p stages forward, then backward (1F1B: Narayanan et al., PipeDream,
arXiv:1806.03377, 2019; Fan et al., DAPPLE, arXiv:2007.01045, 2020). With t_i for the time of stage i per micro-batch,
sending included, the first micro-batch takes the sum of all t_i, and each other one follows the slowest stage:

    T = t_1 + ... + t_p + (m - 1) max t_i

If all are equal, workers wait for (p - 1) / (m + p - 1) of it, which is called the bubble. Stage i, counted from 0,
holds the activations of up to p - i micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from syncline.compute.partition import split
from syncline.errors import ConfigError, UnknownName, plural

_AS_FAST = 1.02
"""Steps that differ by less than this factor count as equally long: measured times vary more."""
_FEW = 16


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """What one unit costs. Times are for a micro-batch of `samples`, on a worker of speed 1."""

    name: str
    forward_s: float
    backward_s: float
    spread_s: float = 0.0
    """The distance between the quartiles of forward and backward time together."""
    samples: int = 1
    sent_bytes: float = 0.0
    """Activations that cross behind it, per sample."""
    returned_bytes: float = 0.0
    """Gradients that come back there, per sample."""
    saved_bytes: float = 0.0
    """What it keeps for its backward pass besides `kept`, per sample."""
    kept: Mapping[int, float] = field(default_factory=dict)
    """Bytes per sample of crossing tensors that it keeps for its backward pass, by number: other units may too."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its trained parameters, by name: tied ones belong to several units."""
    constants: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its frozen parameters and buffers, by name."""

    @property
    def parameter_bytes(self) -> int:
        """The size of its trained parameters."""
        return sum(self.parameters.values())

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """How fast tensors get from one worker to the next. The defaults are those of shared memory."""

    bytes_per_s: float = 5e9
    latency_s: float = 5e-5

    def seconds(self, count: float) -> float:
        """How long so many bytes take."""
        return self.latency_s + count / self.bytes_per_s if count else 0.0


@dataclass(frozen=True)
class StageCut:
    """Stages of consecutive units, and what is predicted of them."""

    edges: tuple[int, ...]
    """The first unit of each stage, and the number of units."""
    names: tuple[str, ...]
    """The names of all units."""
    times_s: tuple[float, ...]
    """For each stage, forward, backward and sending of a micro-batch."""
    memory_bytes: tuple[int, ...]
    """For each stage, parameters, gradients, optimizer state, and the activations of the micro-batches in flight."""
    micro_batches: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first unit of each stage but the first."""
        return self.edges[1:-1]

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """For each stage its first unit, and the one after its last."""
        return tuple(itertools.pairwise(self.edges))

    @property
    def step_s(self) -> float:
        """The predicted time of a step."""
        return step_seconds(self.times_s, self.micro_batches)

    @property
    def bubble(self) -> float:
        """The part of the workers' time in which they wait."""
        busy = self.micro_batches * sum(self.times_s)
        whole = len(self.times_s) * self.step_s
        return 1 - busy / whole if whole else 0.0

    @property
    def balance(self) -> float:
        """The mean time of the stages, relative to the slowest; 1 is even."""
        slowest = max(self.times_s)
        return sum(self.times_s) / len(self.times_s) / slowest if slowest else 1.0

    def describe(self) -> list[str]:
        """Lines for `syncline explain`."""
        lines = [
            f"Stage {number} is {_named(self.names[low:high])}: {1e3 * seconds:,.3g} ms per micro-batch, "
            f"{size / 1e6:,.1f} MB."
            for number, ((low, high), seconds, size) in enumerate(
                zip(self.stages, self.times_s, self.memory_bytes, strict=True)
            )
        ]
        batches, count = self.micro_batches, len(self.times_s)
        even = (count - 1) / (batches + count - 1)
        return [
            *lines,
            f"A step of {plural(batches, 'micro-batch', 'micro-batches')} takes about {1e3 * self.step_s:,.3g} ms. "
            f"Workers wait {self.bubble:.0%} of the time; with equal stages it would be {even:.0%}.",
        ]


def step_seconds(times: Sequence[float], micro_batches: int) -> float:
    """The time of a step with stages of these times."""
    return sum(times) + (micro_batches - 1) * max(times)


def best_cut(
    costs: Sequence[UnitCost],
    stages: int,
    *,
    speeds: Sequence[float] = (),
    memory_limit: int | None = None,
    micro_batches: int,
    link: StageLink | None = None,
    optimizer_state: float = 2.0,
) -> StageCut:
    """The cut with the shortest predicted step.

    With one micro-batch, the stages work one after another, and all cuts take about equally long: then it is the one
    whose largest stage needs the least memory.

    `speeds` are those of the workers, stage by stage. `memory_limit` is in bytes per worker. `optimizer_state` is the
    size of the optimizer's state relative to the parameters: 2 for Adam, 1 for momentum.
    """
    predicted = _Prediction(costs, stages, speeds, micro_batches, link or StageLink(), optimizer_state)
    limit = math.inf if memory_limit is None else memory_limit
    # A search that keeps a few paths per unit gives a bound, with which the exact search leaves out most paths.
    rough = _search(predicted, limit, math.inf, width=4)
    exact = _search(predicted, limit, rough[0] * (1 + 1e-12) if rough else math.inf)
    if exact is None:
        raise _too_large(predicted, limit)
    fastest = predicted.cut(exact[1])
    if micro_batches > 1:
        return fastest
    smallest = predicted.cut(_smallest(predicted, exact[0] * _AS_FAST) or exact[1])
    return min(fastest, smallest, key=lambda cut: max(cut.memory_bytes))


def cut_evenly(
    costs: Sequence[UnitCost],
    stages: int,
    *,
    speeds: Sequence[float] = (),
    micro_batches: int,
    link: StageLink | None = None,
    optimizer_state: float = 2.0,
) -> StageCut:
    """Stages of equally many units, to compare with."""
    predicted = _Prediction(costs, stages, speeds, micro_batches, link or StageLink(), optimizer_state)
    return predicted.cut((0, *(high for _, high in split(len(costs), stages))))


def cut_at(
    costs: Sequence[UnitCost],
    begins: str | Sequence[str],
    *,
    speeds: Sequence[float] = (),
    micro_batches: int,
    link: StageLink | None = None,
    optimizer_state: float = 2.0,
) -> StageCut:
    """The cut whose stages, but the first, begin with the units of these names: "h.3,h.6".

    The end of a name is enough, if no other unit's name ends with it.
    """
    wanted = [name.strip() for name in (begins.split(",") if isinstance(begins, str) else begins)]
    edges = [0, *(find_unit(name, [cost.name for cost in costs]) for name in wanted), len(costs)]
    for (before, after), name in zip(itertools.pairwise(edges), wanted, strict=False):
        if after <= before:
            raise ConfigError(
                f"The cut {','.join(wanted)!r} is not possible: no unit is left for the stage before {name!r}. Name "
                "the first unit of each stage but the first, in the order of the model.",
                code="layout", layout="pipeline", reason="cut-order", name=name,
            )  # fmt: skip
    predicted = _Prediction(costs, len(edges) - 1, speeds, micro_batches, link or StageLink(), optimizer_state)
    return predicted.cut(edges)


def find_unit(name: str, names: Sequence[str]) -> int:
    """The unit of this name, the first inside of a block of this name, or the only one whose name ends with it.

    `UnknownName` if there is none.
    """
    if name in names:
        return names.index(name)
    inside = [index for index, known in enumerate(names) if known.startswith(f"{name}.")]
    if inside:
        return inside[0]
    ending = [index for index, known in enumerate(names) if known.endswith(f".{name}")]
    if len(ending) != 1:
        shown = [short for known in names for short in _endings(known)] if not ending else list(names)
        raise UnknownName.among("unit", name, shown)
    return ending[0]


def _endings(name: str) -> list[str]:
    """The name and its endings, from the longest to the shortest."""
    words = name.split(".")
    return [".".join(words[first:]) for first in range(len(words))]


def check_stage_count(stages: int, units: int, kept_whole: Mapping[str, str] | None = None) -> None:
    """`ConfigError` if a chain of so many units cannot be cut into so many stages.

    `kept_whole` has the modules that could not be taken apart, and why.
    """
    if stages < 1:
        raise ConfigError.for_setting("stages", stages, "1 or more")
    if stages > units:
        reasons = [f" {name} is not taken apart, because {why}." for name, why in (kept_whole or {}).items()]
        raise ConfigError(
            f"The model has {plural(units, 'unit')} that can be a stage, so it cannot be cut into {stages} stages. Use "
            f"{units} or fewer.{''.join(reasons)}",
            code="layout", layout="pipeline", reason="too-many-stages", stages=stages, possible=units,
        )  # fmt: skip


class _Prediction:
    """Time and memory of stages."""

    def __init__(
        self,
        costs: Sequence[UnitCost],
        stages: int,
        speeds: Sequence[float],
        micro_batches: int,
        link: StageLink,
        optimizer_state: float,
    ) -> None:
        check_stage_count(stages, len(costs))
        if speeds and (len(speeds) != stages or min(speeds) <= 0):
            raise ValueError(f"{stages} stages need as many speeds above 0, not {list(speeds)}.")
        if micro_batches < 1:
            raise ConfigError.for_setting("micro_batches", micro_batches, "1 or more")
        self.costs, self.stages, self.micro_batches = costs, stages, micro_batches
        self._speeds = tuple(speeds) or (1.0,) * stages
        self._seconds = (0.0, *itertools.accumulate(cost.seconds for cost in costs))
        last = len(costs) - 1
        self._sending = [link.seconds(cost.sent_bytes * cost.samples) * (n < last) for n, cost in enumerate(costs)]
        self._returning = [
            link.seconds(cost.returned_bytes * cost.samples) * (n < last) for n, cost in enumerate(costs)
        ]
        self._state = optimizer_state
        self._capacity = [sum(self._speeds[stage:]) for stage in range(stages)]
        self._fastest = [max(self._speeds[stage:]) for stage in range(stages)]

    def time(self, stage: int, low: int, high: int) -> float:
        """Forward, backward, sending activations on and gradients back, for one micro-batch."""
        return self.work(stage, low, high) + self._sending[high - 1] + (self._returning[low - 1] if low else 0.0)

    def work(self, stage: int, low: int, high: int) -> float:
        """Forward and backward, for one micro-batch."""
        return (self._seconds[high] - self._seconds[low]) / self._speeds[stage]

    def least(self, stage: int, low: int) -> tuple[float, float]:
        """What the stages from this one on, which begin with unit `low`, cannot undercut: the slowest, and the sum."""
        if stage == self.stages:
            return 0.0, 0.0
        work = self._seconds[-1] - self._seconds[low]
        return work / self._capacity[stage], work / self._fastest[stage]

    def memory(self, stage: int, low: int, high: int) -> int:
        """What the worker of this stage holds."""
        *_, found = self.memories(stage, low, high)
        return found

    def memories(self, stage: int, low: int, high: int) -> Iterable[int]:
        """The memory of a stage that ends after `low`, then a unit later, and so on until `high`."""
        in_flight = min(self.micro_batches, self.stages - stage)
        parameters: dict[str, int] = {}
        constants: dict[str, int] = {}
        kept: dict[int, float] = {}
        saved = 0.0
        for cost in self.costs[low:high]:
            parameters.update(cost.parameters)
            constants.update(cost.constants)
            kept.update({number: size * cost.samples for number, size in cost.kept.items()})
            saved += cost.saved_bytes * cost.samples
            held = sum(parameters.values()) * (2 + self._state) + sum(constants.values())
            sent = cost.sent_bytes * cost.samples
            yield math.ceil(held + in_flight * (saved + max(sum(kept.values()), sent)))

    def cut(self, edges: Sequence[int]) -> StageCut:
        """What is predicted of a cut."""
        stages = list(enumerate(itertools.pairwise(edges)))
        return StageCut(
            tuple(edges),
            tuple(cost.name for cost in self.costs),
            tuple(self.time(stage, low, high) for stage, (low, high) in stages),
            tuple(self.memory(stage, low, high) for stage, (low, high) in stages),
            self.micro_batches,
        )


_Path = tuple[float, float, tuple[int, ...]]
"""The slowest stage, the sum of all, and the edges."""


def _search(
    predicted: _Prediction, limit: float, bound: float, *, width: int | None = None
) -> tuple[float, tuple[int, ...]] | None:
    """The shortest step and its edges, among those within the limit of memory and the bound of time.

    Dynamic programming over stages. Of two paths to the same unit, one can be left out if it has both the slower
    slowest stage and the larger sum; with a `width`, no more than so many are kept.
    """
    count, batches = len(predicted.costs), predicted.micro_batches
    paths: dict[int, list[_Path]] = {0: [(0.0, 0.0, (0,))]}
    for stage in range(predicted.stages):
        latest = count - (predicted.stages - stage - 1)
        reached: dict[int, list[_Path]] = {}
        for low, before in paths.items():
            memories = predicted.memories(stage, low, latest) if limit < math.inf else itertools.repeat(0)
            for high, memory in zip(range(low + 1, latest + 1), memories, strict=False):
                if batches * predicted.work(stage, low, high) > bound:
                    break  # and longer stages have more to do
                if memory > limit or (latest == count and high < count):
                    continue
                seconds = predicted.time(stage, low, high)
                least, rest = predicted.least(stage + 1, high)
                for slowest, total, edges in before:
                    longest = max(slowest, seconds)
                    if (batches - 1) * max(longest, least) + total + seconds + rest <= bound:
                        reached.setdefault(high, []).append((longest, total + seconds, (*edges, high)))
        paths = {
            high: _kept(found, width, batches, predicted.least(stage + 1, high)[0]) for high, found in reached.items()
        }
    ends = [((batches - 1) * slowest + total, edges) for slowest, total, edges in paths.get(count, [])]
    return min(ends, default=None)


def _kept(paths: list[_Path], width: int | None, batches: int, least: float) -> list[_Path]:
    """The paths of which none is worse than another in both respects; of these, the most promising."""
    kept: list[_Path] = []
    for path in sorted(paths):
        if not kept or path[1] < kept[-1][1]:
            kept.append(path)
    return sorted(kept, key=lambda path: (batches - 1) * max(path[0], least) + path[1])[:width]


def _smallest(predicted: _Prediction, bound: float) -> tuple[int, ...] | None:
    """The edges whose largest stage needs the least memory, of those with a sum of times within the bound.

    As in `_search`, with the largest stage in place of the slowest; a few paths are kept to each unit.
    """
    count = len(predicted.costs)
    paths: dict[int, list[_Path]] = {0: [(0.0, 0.0, (0,))]}
    for stage in range(predicted.stages):
        latest = count - (predicted.stages - stage - 1)
        reached: dict[int, list[_Path]] = {}
        for low, before in paths.items():
            for high, memory in zip(range(low + 1, latest + 1), predicted.memories(stage, low, latest), strict=True):
                if latest == count and high < count:
                    continue
                seconds, (_, rest) = predicted.time(stage, low, high), predicted.least(stage + 1, high)
                for largest, total, edges in before:
                    if total + seconds + rest <= bound:
                        found = (max(largest, memory), total + seconds, (*edges, high))
                        reached.setdefault(high, []).append(found)
        paths = {high: _undominated(found)[:_FEW] for high, found in reached.items()}
    return min(paths[count])[2] if paths.get(count) else None


def _undominated(paths: Sequence[_Path]) -> list[_Path]:
    """Those that no other undercuts in both figures, in the order of the first."""
    kept: list[_Path] = []
    for path in sorted(paths):
        if not kept or path[1] < kept[-1][1]:
            kept.append(path)
    return kept


def _too_large(predicted: _Prediction, limit: float) -> ConfigError:
    """The error if no cut fits into memory, with the limit that would do."""
    least = {0: 0}
    count = len(predicted.costs)
    for stage in range(predicted.stages):
        reached: dict[int, int] = {}
        for low, before in least.items():
            latest = count - (predicted.stages - stage - 1)
            for high, memory in zip(range(low + 1, latest + 1), predicted.memories(stage, low, latest), strict=True):
                reached[high] = min(reached.get(high, max(before, memory)), max(before, memory))
        least = reached
    needed = least[count]
    return ConfigError(
        f"No cut into {plural(predicted.stages, 'stage')} fits into {limit / 1e6:,.1f} MB per worker: the best needs "
        f"{needed / 1e6:,.1f} MB. Use more stages, smaller micro-batches, or --checkpoint-activations.",
        code="layout", layout="pipeline", reason="memory", needed=needed, limit=int(limit), stages=predicted.stages,
    )  # fmt: skip


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} units)"
