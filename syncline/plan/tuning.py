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
    "CHOICES", "Choice", "Finding", "Tuning", "fastest", "in_words", "losses_agree", "search", "with_convolutions",
    "with_loaders",
]  # fmt: skip

Choice = Literal["memory-format", "convolutions", "threads", "loaders", "precision"]
CHOICES: tuple[Choice, ...] = ("memory-format", "convolutions", "threads", "loaders", "precision")

_LEAST_GAIN = 1.05
"""How much faster something must be to be preferred to what is usual: less may be chance."""
_LEAST_GAIN_S = 1e-4
"""How much time that must save in one layer: less is lost again to the Python that it takes."""
_TOLERANCE = 0.05
"""How far the loss in bf16 may be from that in float32, as a part of it, on average over some steps."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a worker computes. None: as the plan has it."""

    memory_format: Literal["contiguous", "channels-last"] = "contiguous"
    precision: Literal["float32", "bf16"] = "float32"
    threads: int | None = None
    loaders: int | None = None
    convolutions: tuple[str, ...] = ()
    """The layers whose weight gradients are computed as products of matrices."""

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


@dataclass
class _Search:
    """A search in progress."""

    measure: Measure
    best: Tuning
    findings: list[Finding] = field(default_factory=list)

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
) -> tuple[Tuning, tuple[Finding, ...]]:
    """The fastest way to compute that these choices allow: one choice after the other, each with what is best so far.

    `threads` are those of the plan, `check_bf16` says what speaks against bf16, if anything.
    """
    found = _Search(measure, start)
    if "memory-format" in choices and has_images:
        other = replace(found.best, memory_format="channels-last")
        found.try_out("memory-format", [("channels-last memory", other)], "contiguous memory", _no_objection)
    if "precision" in choices:
        other = replace(found.best, precision="bf16")
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


def with_convolutions(tuning: Tuning, times: Mapping[str, tuple[float, float]]) -> tuple[Tuning, tuple[Finding, ...]]:
    """Weight gradients by matrices for the layers in which that is faster.

    `times` are those of each layer's gradient, as torch computes it and by matrices.
    """
    names = tuple(
        name
        for name, (by_torch, by_matrices) in times.items()
        if fastest((by_torch, by_matrices)) == 1 and by_torch - by_matrices >= _LEAST_GAIN_S
    )
    if not names:
        return tuning, ()
    finding = Finding(
        choice="convolutions",
        usual="by torch's own way",
        other=f"weight gradients of {_counted(len(names), 'convolution')} by matrices",
        speed=sum(times[name][0] for name in names) / sum(times[name][1] for name in names),
        is_taken=True,
    )
    return replace(tuning, convolutions=names), (finding,)


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


def _no_objection() -> str:
    return ""


def _threads(number: int) -> str:
    return _counted(number, "thread")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
