"""Choices that change the speed of a run but not its result, and how measurements decide them.

Here: `Tuning`, `search`, which finds the fastest one by one choice after the other, and the description of the result.
Pure: times come from the caller (`measure`). Not here: measuring (`workers/calibrate.py`), and caching the results
(`workers/tuning_cache.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import msgspec

from syncline.errors import plural

Choice = Literal["memory-format", "convolutions", "threads", "loaders", "precision"]
CHOICES: tuple[Choice, ...] = ("memory-format", "convolutions", "threads", "loaders", "precision")

Pass = Literal["forward", "input", "weight"]
"""The passes of a layer: its output, and the gradients of its input and of its weight."""
Algorithm = Literal["torch", "matrices", "compiled", "winograd"]
PASSES: tuple[tuple[Pass, tuple[Algorithm, ...]], ...] = (
    ("forward", ("torch", "compiled", "winograd")),
    ("input", ("torch", "compiled", "winograd")),
    ("weight", ("torch", "matrices", "compiled", "winograd")),
)
"""The algorithms for each pass; the first is the default."""
PassTimes = Mapping[tuple[Pass, Algorithm], float]
"""Seconds for the passes of one layer by each algorithm; infinite where an algorithm is unavailable."""

_LEAST_GAIN = 1.05
"""The least speedup over the default: less may be noise."""
_LEAST_GAIN_S = 1e-4
"""The least time saved in one layer: less is lost again to Python overhead."""
_TOLERANCE = 0.05
"""The tolerated relative difference between the bf16 and float32 losses, averaged over some steps."""


@dataclass(frozen=True, kw_only=True)
class Algorithms:
    """The algorithms of one convolution; a pooling layer has only one, that of `forward`."""

    forward: Algorithm = "torch"
    input: Algorithm = "torch"
    weight: Algorithm = "torch"

    def of(self, which: Pass) -> Algorithm:
        algorithm: Algorithm = getattr(self, which)
        return algorithm


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a worker computes. None: as in the plan."""

    memory_format: Literal["contiguous", "channels-last"] = "contiguous"
    precision: Literal["float32", "bf16"] = "float32"
    threads: int | None = None
    loaders: int | None = None
    layers: dict[str, Algorithms] = field(default_factory=dict)
    """The layers that use other algorithms than torch's, by name."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tuning:
        return msgspec.convert(data, cls)


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The result of one choice: how much faster `other` is than `usual`, and whether it was chosen."""

    choice: Choice
    usual: str
    other: str
    speed: float
    """The speed of `other` relative to `usual`; 0 if it does not work with this model."""
    is_taken: bool
    because: str = ""

    def describe(self) -> str:
        if self.speed == 0:
            return f"{self.other} does not work with this model"
        pace = f"{self.speed:.2g} times as fast as {self.usual}"
        if self.is_taken:
            return f"{self.other}, {pace}"
        return f"{self.usual} ({self.other} is {pace}{f', but {self.because}' if self.because else ''})"


Measure = Callable[[Sequence[Tuning]], Sequence[float]]
"""Seconds per step with each tuning; infinite where it does not work."""


@dataclass(frozen=True)
class TunedLayers:
    """A tuning with the fastest algorithms for its layers."""

    tuning: Tuning
    results: tuple[TuningResult, ...] = ()
    layer_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per training step of each layer; empty if timing whole steps is more reliable."""


TuneLayers = Callable[[Tuning], TunedLayers]


@dataclass
class _Search:
    """A search in progress."""

    measure: Measure
    best: Tuning
    results: list[TuningResult] = field(default_factory=list)

    def try_forms(self, tune_layers: TuneLayers, *, tries_channels_last: bool) -> None:
        """Choose the algorithm of each layer, unless that makes steps slower, and the memory format.

        If steps are measured with few samples, the times of the layers count for the memory format, too.
        """
        plain, last = self.best, replace(self.best, memory_format="channels-last")
        tuned = tune_layers(plain)
        forms = [replace(tuned, tuning=plain, results=())]
        if tuned.tuning != plain:
            forms.append(tuned)
        if tries_channels_last:
            forms.append(tune_layers(last))
        times = list(self.measure([form.tuning for form in forms])) if len(forms) > 1 else [0.0]
        usual = min(range(len(forms) - tries_channels_last), key=lambda k: times[k])
        self.best, self.results = forms[usual].tuning, [*forms[usual].results]
        if tries_channels_last:
            self._try_channels_last(forms[usual], times[usual], forms[-1], times[-1], last)

    def _try_channels_last(
        self, usual: TunedLayers, usual_s: float, other: TunedLayers, other_s: float, last: Tuning
    ) -> None:
        if other_s == math.inf and other.tuning != last:  # the format may still work with torch's layers
            other = TunedLayers(tuning=last)
            usual_s, other_s = self.measure([self.best, last])
        both = [name for name in usual.layer_s if usual.layer_s[name] + other.layer_s.get(name, math.inf) < math.inf]
        if both and other_s < math.inf:
            # Steps were timed alternately, but with few samples; layers with all samples, but one format after the
            # other, while the load of the machine may have changed. The geometric mean weighs both.
            usual_s, other_s = (
                math.sqrt(step_s * sum(form.layer_s[name] for name in both))
                for form, step_s in ((usual, usual_s), (other, other_s))
            )
        is_taken = fastest([usual_s, other_s]) > 0
        about = TuningResult(
            choice="memory-format",
            usual="contiguous memory",
            other="channels-last memory",
            speed=usual_s / other_s,
            is_taken=is_taken,
        )
        if is_taken:
            self.best, self.results = other.tuning, [about, *other.results]
        else:
            self.results.append(about)

    def try_out(
        self, choice: Choice, others: Sequence[tuple[str, Tuning]], usual: str, check: Callable[[], str]
    ) -> None:
        """Switch to the fastest of `others` if it is clearly faster and `check` returns no objection."""
        if not others:
            return
        times = self.measure([self.best, *(tuning for _, tuning in others)])
        (name, tuning), time_s = min(zip(others, times[1:], strict=True), key=lambda pair: pair[1])
        is_faster = fastest(times) > 0
        objection = check() if is_faster else ""
        is_taken = is_faster and not objection
        self.results.append(
            TuningResult(
                choice=choice,
                usual=usual,
                other=name,
                speed=times[0] / time_s,
                is_taken=is_taken,
                because=objection,
            )
        )
        if is_taken:
            self.best = tuning


def search(
    start: Tuning,
    choices: Sequence[Choice],
    measure: Measure,
    *,
    has_images: bool,
    threads: int,
    check_bf16: Callable[[Tuning], str],
    tune_layers: TuneLayers | None = None,
) -> tuple[Tuning, tuple[TuningResult, ...]]:
    """The fastest tuning that `choices` allow: a greedy search, one choice after the other.

    `threads` is the plan's number, `check_bf16` returns an objection to bf16, if any.
    """
    found = _Search(measure, start)
    tune_layers = tune_layers if "convolutions" in choices and tune_layers is not None else TunedLayers
    found.try_forms(tune_layers, tries_channels_last="memory-format" in choices and has_images)
    if "precision" in choices:
        other = replace(found.best, precision="bf16", layers={})
        found.try_out("precision", [("bf16", other)], "float32", lambda: check_bf16(other))
    if "threads" in choices and threads > 1:
        fewer = sorted({1, threads // 2} - {threads}, reverse=True)
        others = [(plural(n, "thread"), replace(found.best, threads=n)) for n in fewer]
        found.try_out("threads", others, plural(threads, "thread"), lambda: "")
    return found.best, tuple(found.results)


def fastest(times: Sequence[float]) -> int:
    """The index of the fastest; the first, which is the default, unless another one is clearly faster."""
    best = min(range(len(times)), key=lambda k: times[k])
    return best if times[best] * _LEAST_GAIN <= times[0] else 0


def with_layers(tuning: Tuning, times: Mapping[str, PassTimes]) -> TunedLayers:
    """The fastest algorithm for each pass of each layer in which that saves enough time."""
    layers: dict[str, Algorithms] = {}
    for name, of_layer in times.items():
        algorithms = Algorithms(
            **{
                which: algorithms[fastest([of_layer[which, algorithm] for algorithm in algorithms])]
                for which, algorithms in PASSES
            }
        )
        saved_s = sum(of_layer[which, "torch"] - of_layer[which, algorithms.of(which)] for which, _ in PASSES)
        if saved_s >= _LEAST_GAIN_S:
            layers[name] = algorithms
    results = []
    others: tuple[tuple[Algorithm, str], ...] = (
        ("compiled", "compiled code"),
        ("winograd", "Winograd's method"),
        ("matrices", "matrices"),
    )
    for algorithm, by in others:
        taken = [
            (times[name], which)
            for name, algorithms in layers.items()
            for which, _ in PASSES
            if algorithms.of(which) == algorithm
        ]
        if taken:
            usual_s = sum(of_layer[which, "torch"] for of_layer, which in taken)
            speed = usual_s / sum(of_layer[which, algorithm] for of_layer, which in taken)
            what = f"{plural(len(taken), 'pass', 'passes')} of layers by {by}"
            results.append(TuningResult(choice="convolutions", usual="torch", other=what, speed=speed, is_taken=True))
    layer_s = {
        name: sum(of_layer[which, layers.get(name, Algorithms()).of(which)] for which, _ in PASSES)
        for name, of_layer in times.items()
    }
    return TunedLayers(tuning=replace(tuning, layers=layers), results=tuple(results), layer_s=layer_s)


def with_loaders(tuning: Tuning, fetch_s: float, step_s: float, cores: int) -> tuple[Tuning, tuple[TuningResult, ...]]:
    """Enough loader processes that a step does not wait for data, but no more than there are cores."""
    number = min(math.ceil(fetch_s / step_s), cores)
    if number <= 1:
        return tuning, ()
    speed = max(step_s, fetch_s) / max(step_s, fetch_s / number)
    result = TuningResult(choice="loaders", usual="1 loader", other=f"{number} loaders", speed=speed, is_taken=True)
    return replace(tuning, loaders=number), (result,)


def losses_agree(in_float32: Sequence[float], in_bf16: Sequence[float]) -> bool:
    """Whether training in bf16 follows training in float32."""
    if not all(math.isfinite(loss) for loss in (*in_float32, *in_bf16)):
        return False
    apart = sum(abs(a - b) for a, b in zip(in_float32, in_bf16, strict=True))
    return apart <= _TOLERANCE * sum(map(abs, in_float32))


def describe_results(results: Sequence[TuningResult], seconds: float) -> str:
    """One line for the user; `seconds` is 0 if the results come from the cache."""
    how = f"measured in {seconds:.1f} s" if seconds else "cached"
    return f"tuned ({how}): {'; '.join(result.describe() for result in results)}"
