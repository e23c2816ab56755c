"""What makes a run fast and not different: the choices that are left to measuring, and how measurements decide.

Here: `Tuning`, `search`, which looks for the fastest one step by step, and the words for what it found. Pure: how long
something takes is asked for (`measure`). Not here: taking measurements (`workers/calibrate.py`), and remembering them
(`workers/tuning_cache.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import msgspec

__all__ = [
    "CHOICES", "PASSES", "Choice", "Equipped", "Finding", "Pass", "PassTimes", "Tuning", "Way", "Ways", "fastest",
    "in_words", "losses_agree", "search", "with_layers", "with_loaders",
]  # fmt: skip

Choice = Literal["memory-format", "convolutions", "threads", "loaders", "precision"]
CHOICES: tuple[Choice, ...] = ("memory-format", "convolutions", "threads", "loaders", "precision")

Pass = Literal["forward", "input", "weight"]
"""Of a layer: its output, and the gradients of its input and of its weight."""
Way = Literal["torch", "matrices", "compiled", "winograd"]
PASSES: tuple[tuple[Pass, tuple[Way, ...]], ...] = (
    ("forward", ("torch", "compiled", "winograd")),
    ("input", ("torch", "compiled", "winograd")),
    ("weight", ("torch", "matrices", "compiled", "winograd")),
)
"""In which ways each can be computed; the first one is what is usual."""
PassTimes = Mapping[tuple[Pass, Way], float]
"""Seconds for the passes of one layer in each way; infinite where a way is not there."""

_LEAST_GAIN = 1.05
"""How much faster something must be to be preferred to what is usual: less may be chance."""
_LEAST_GAIN_S = 1e-4
"""How much time that must save in one layer: less is lost again to the Python that it takes."""
_TOLERANCE = 0.05
"""How far the loss in bf16 may be from that in float32, as a part of it, on average over some steps."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How one convolution computes its passes; a pooling has one way, that of `forward`."""

    forward: Way = "torch"
    input: Way = "torch"
    weight: Way = "torch"

    def of(self, which: Pass) -> Way:
        """How it computes this one."""
        way: Way = getattr(self, which)
        return way


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a worker computes. None: as the plan has it."""

    memory_format: Literal["contiguous", "channels-last"] = "contiguous"
    precision: Literal["float32", "bf16"] = "float32"
    threads: int | None = None
    loaders: int | None = None
    layers: dict[str, Ways] = field(default_factory=dict)
    """Convolutions and poolings that are not computed as torch does, by their names."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tuning:
        """What `to_dict` told."""
        return msgspec.convert(data, cls)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one choice: how much faster `other` is than `usual`, and whether it was taken."""

    choice: Choice
    usual: str
    other: str
    speed: float
    """Of `other`, over that of `usual`; 0 if it does not work with this model."""
    is_taken: bool
    because: str = ""

    def in_words(self) -> str:
        """As a person would tell it."""
        if self.speed == 0:
            return f"{self.other} does not work with this model"
        pace = f"{self.speed:.2g} times as fast as {self.usual}"
        if self.is_taken:
            return f"{self.other}, {pace}"
        return f"{self.usual} ({self.other} is {pace}{f', but {self.because}' if self.because else ''})"


Measure = Callable[[Sequence[Tuning]], Sequence[float]]
"""How long a step takes with each of these; infinite where it does not work."""


@dataclass(frozen=True, kw_only=True)
class Equipped:
    """A tuning with the fastest ways to compute layers in it."""

    tuning: Tuning
    findings: tuple[Finding, ...] = ()
    layer_s: Mapping[str, float] = field(default_factory=dict)
    """How long each of them takes in a step of training; empty where whole steps tell better."""


Equip = Callable[[Tuning], Equipped]


@dataclass
class _Search:
    """A search in progress."""

    measure: Measure
    best: Tuning
    findings: list[Finding] = field(default_factory=list)

    def try_forms(self, equip: Equip, *, tries_channels_last: bool) -> None:
        """Compute layers as is fastest for each, if steps are then not slower; and in which memory format.

        If steps are tried out with few samples, the layers have a say in which format is faster.
        """
        plain, last = self.best, replace(self.best, memory_format="channels-last")
        equipped = equip(plain)
        forms = [replace(equipped, tuning=plain, findings=())]
        if equipped.tuning != plain:
            forms.append(equipped)
        if tries_channels_last:
            forms.append(equip(last))
        times = list(self.measure([form.tuning for form in forms])) if len(forms) > 1 else [0.0]
        usual = min(range(len(forms) - tries_channels_last), key=lambda k: times[k])
        self.best, self.findings = forms[usual].tuning, [*forms[usual].findings]
        if tries_channels_last:
            self._try_channels_last(forms[usual], times[usual], forms[-1], times[-1], last)

    def _try_channels_last(
        self, usual: Equipped, usual_s: float, other: Equipped, other_s: float, last: Tuning
    ) -> None:
        if other_s == math.inf and other.tuning != last:  # perhaps the format does work, with torch's layers
            other = Equipped(tuning=last)
            usual_s, other_s = self.measure([self.best, last])
        both = [name for name in usual.layer_s if usual.layer_s[name] + other.layer_s.get(name, math.inf) < math.inf]
        if both and other_s < math.inf:
            # Steps were timed by turns, but with few samples; layers with all of them, but one format after the other,
            # and the machine may have had something else to do meanwhile. Both are heard.
            usual_s, other_s = (
                math.sqrt(step_s * sum(form.layer_s[name] for name in both))
                for form, step_s in ((usual, usual_s), (other, other_s))
            )
        is_taken = fastest([usual_s, other_s]) > 0
        about = Finding(
            choice="memory-format",
            usual="contiguous memory",
            other="channels-last memory",
            speed=usual_s / other_s,
            is_taken=is_taken,
        )
        if is_taken:
            self.best, self.findings = other.tuning, [about, *other.findings]
        else:
            self.findings.append(about)

    def try_out(
        self, choice: Choice, others: Sequence[tuple[str, Tuning]], usual: str, check: Callable[[], str]
    ) -> None:
        """Go over to the fastest of the others, if it is enough faster and `check` has no objection."""
        if not others:
            return
        times = self.measure([self.best, *(tuning for _, tuning in others)])
        (name, tuning), time_s = min(zip(others, times[1:], strict=True), key=lambda pair: pair[1])
        is_faster = fastest(times) > 0
        objection = check() if is_faster else ""
        is_taken = is_faster and not objection
        self.findings.append(
            Finding(
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
    equip: Equip | None = None,
) -> tuple[Tuning, tuple[Finding, ...]]:
    """The fastest way to compute that these choices allow: one choice after the other, each with what is best so far.

    `threads` are those of the plan, `check_bf16` says what speaks against bf16, if anything.
    """
    found = _Search(measure, start)
    equip = equip if "convolutions" in choices and equip is not None else _nothing_more
    found.try_forms(equip, tries_channels_last="memory-format" in choices and has_images)
    if "precision" in choices:
        other = replace(found.best, precision="bf16", layers={})
        found.try_out("precision", [("bf16", other)], "float32", lambda: check_bf16(other))
    if "threads" in choices and threads > 1:
        fewer = sorted({1, threads // 2} - {threads}, reverse=True)
        others = [(_threads(n), replace(found.best, threads=n)) for n in fewer]
        found.try_out("threads", others, _threads(threads), _no_objection)
    return found.best, tuple(found.findings)


def fastest(times: Sequence[float]) -> int:
    """Which of these is fastest; the first, which is what is usual, unless another one is clearly faster."""
    best = min(range(len(times)), key=lambda k: times[k])
    return best if times[best] * _LEAST_GAIN <= times[0] else 0


def with_layers(tuning: Tuning, times: Mapping[str, PassTimes]) -> Equipped:
    """The fastest way for each pass of each layer, for those in which that saves enough."""
    layers: dict[str, Ways] = {}
    for name, of_layer in times.items():
        ways = Ways(**{which: ways[fastest([of_layer[which, way] for way in ways])] for which, ways in PASSES})
        saved_s = sum(of_layer[which, "torch"] - of_layer[which, ways.of(which)] for which, _ in PASSES)
        if saved_s >= _LEAST_GAIN_S:
            layers[name] = ways
    findings = []
    others: tuple[tuple[Way, str], ...] = (
        ("compiled", "compiled code"),
        ("winograd", "Winograd's method"),
        ("matrices", "matrices"),
    )
    for way, by in others:
        taken = [(times[name], which) for name, ways in layers.items() for which, _ in PASSES if ways.of(which) == way]
        if taken:
            usual_s = sum(of_layer[which, "torch"] for of_layer, which in taken)
            speed = usual_s / sum(of_layer[which, way] for of_layer, which in taken)
            what = f"{_counted(len(taken), 'pass', 'passes')} of layers by {by}"
            findings.append(
                Finding(choice="convolutions", usual="by torch's own way", other=what, speed=speed, is_taken=True)
            )
    layer_s = {
        name: sum(of_layer[which, layers.get(name, Ways()).of(which)] for which, _ in PASSES)
        for name, of_layer in times.items()
    }
    return Equipped(tuning=replace(tuning, layers=layers), findings=tuple(findings), layer_s=layer_s)


def with_loaders(tuning: Tuning, fetch_s: float, step_s: float, cores: int) -> tuple[Tuning, tuple[Finding, ...]]:
    """As many processes that fetch samples as keep a step from waiting for them, if there are cores for them."""
    number = min(math.ceil(fetch_s / step_s), cores)
    if number <= 1:
        return tuning, ()
    speed = max(step_s, fetch_s) / max(step_s, fetch_s / number)
    finding = Finding(choice="loaders", usual="1 loader", other=f"{number} loaders", speed=speed, is_taken=True)
    return replace(tuning, loaders=number), (finding,)


def losses_agree(in_float32: Sequence[float], in_bf16: Sequence[float]) -> bool:
    """Whether training in bf16 goes as it does in float32."""
    if not all(math.isfinite(loss) for loss in (*in_float32, *in_bf16)):
        return False
    apart = sum(abs(a - b) for a, b in zip(in_float32, in_bf16, strict=True))
    return apart <= _TOLERANCE * sum(map(abs, in_float32))


def in_words(findings: Sequence[Finding], seconds: float) -> str:
    """What came of measuring that took so long, or that is remembered if it took no time."""
    how = f"measured in {seconds:.1f} s" if seconds else "as measured before"
    return f"tuned ({how}): {'; '.join(finding.in_words() for finding in findings)}"


def _nothing_more(tuning: Tuning) -> Equipped:
    return Equipped(tuning=tuning)


def _no_objection() -> str:
    return ""


def _threads(number: int) -> str:
    return _counted(number, "thread")


def _counted(number: int, what: str, many: str = "") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {many or what + 's'}"
