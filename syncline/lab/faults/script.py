"""The text form of faults.

Here: `Fault`, reading and printing it, both pure. Not here: making it happen (`injector.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from syncline.errors import ConfigError, UnknownName

FaultKind = Literal["kill", "stop", "slow", "raise", "cut", "disconnect", "lose", "fill"]

_FORMS: dict[FaultKind, str] = {
    "kill": "kill worker K at step N, or: kill server K at step N",
    "stop": "stop worker K at step N [for 5s], or: stop server K at step N [for 5s]",
    "slow": "slow worker K at step N by 5x [for 10s], or: slow worker K at step N by 0.2s [for 10s]",
    "raise": "raise in worker K at step N",
    "cut": "cut worker K at step N [for 5s]",
    "disconnect": "disconnect worker K at step N",
    "lose": "lose 10% of packets to worker K at step N [for 5s]",
    "fill": "fill the disk at step N [for 5s]",
}
_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_TIME = rf"{_NUMBER} ?(?:ms|s|min)"
_AT, _FOR = r" at step (?P<step>\d+)", rf"(?: for (?P<for_s>{_TIME}))?"
_PATTERNS: dict[FaultKind, str] = {
    "kill": rf"kill (?P<role>worker|server) (?P<target>\d+){_AT}",
    "stop": rf"stop (?P<role>worker|server) (?P<target>\d+){_AT}{_FOR}",
    "slow": rf"slow worker (?P<target>\d+){_AT} by (?:(?P<factor>{_NUMBER}) ?x|(?P<delay_s>{_TIME})){_FOR}",
    "raise": rf"raise in worker (?P<target>\d+){_AT}",
    "cut": rf"cut worker (?P<target>\d+){_AT}{_FOR}",
    "disconnect": rf"disconnect worker (?P<target>\d+){_AT}",
    "lose": rf"lose (?P<percent>{_NUMBER}) ?% of packets to worker (?P<target>\d+){_AT}{_FOR}",
    "fill": rf"fill the disk{_AT}{_FOR}",
}
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_LARGEST_STEP = 10**15


@dataclass(frozen=True)
class Fault:
    """One fault, which happens once, when its target begins `step`; 0 is the first step.

    >>> str(Fault("slow", step=10, target=0, factor=5, for_s=2.5))
    'slow worker 0 at step 10 by 5x for 2.5s'
    """

    kind: FaultKind
    step: int
    target: int | None = None
    """The worker_id, or the number of a server among the servers. None: the fault hits all workers."""
    is_server: bool = False
    factor: float | None = None
    """A slow step takes this many times as long."""
    delay_s: float | None = None
    """A slow step takes this much longer."""
    percent: float | None = None
    """The share of packets that are dropped."""
    for_s: float | None = None
    """None: until the process ends; a fault without duration happens once."""

    def __post_init__(self) -> None:
        if self.kind not in _FORMS:
            raise ConfigError(f"A fault of kind {self.kind!r} does not exist; the kinds are {', '.join(_FORMS)}.")
        hint = f"Write it as: {_FORMS[self.kind]}."
        if not 0 <= self.step <= _LARGEST_STEP:
            raise ConfigError(f"Step {self.step} does not exist: steps are counted from 0. {hint}")
        if (self.target is None) != (self.kind == "fill") or (self.target or 0) < 0:
            raise ConfigError(f"{self.kind!r} does not fit the target {self.target}. {hint}")
        if self.is_server and self.kind not in ("kill", "stop"):
            raise ConfigError(f"{self.kind!r} applies to workers only, not to parameter servers. {hint}")
        if self.for_s is not None and self.kind in ("kill", "raise", "disconnect"):
            raise ConfigError(f"{self.kind!r} has no duration, but 'for {self.for_s:g}s' was given. {hint}")
        if (self.factor is not None) + (self.delay_s is not None) != (self.kind == "slow"):
            raise ConfigError(f"Only 'slow' takes a factor or a delay, and exactly one of them. {hint}")
        if (self.percent is not None) != (self.kind == "lose"):
            raise ConfigError(f"Only 'lose' takes a percentage, and it needs one. {hint}")
        if self.percent is not None and not 0 < self.percent <= 100:
            raise ConfigError(f"Cannot drop {self.percent:g}% of packets: it must be above 0 and at most 100.")
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ConfigError(f"Cannot slow a worker down {self.factor:g}x: the factor must be 1 or more.")
        for seconds in (self.delay_s, self.for_s):
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"A duration of {seconds:g} s is not possible: it must be finite and more than 0.")

    def __str__(self) -> str:
        target = f"{'server' if self.is_server else 'worker'} {self.target}"
        at = f"at step {self.step}"
        lasting = f" for {_plain(self.for_s)}s" if self.for_s is not None else ""
        match self.kind:
            case "raise":
                return f"raise in {target} {at}"
            case "slow":
                by = f"{_plain(self.factor)}x" if self.factor is not None else f"{_plain(self.delay_s)}s"
                return f"slow {target} {at} by {by}{lasting}"
            case "lose":
                return f"lose {_plain(self.percent)}% of packets to {target} {at}{lasting}"
            case "fill":
                return f"fill the disk {at}{lasting}"
            case kind:
                return f"{kind} {target} {at}{lasting}"


def read_fault(text: str) -> Fault:
    """Parse one fault, as printed by `str(fault)` or written by a user."""
    words = " ".join(text.split()).lower()
    kind = words.partition(" ")[0]
    if kind not in _PATTERNS:
        raise UnknownName.among("fault", kind, _FORMS, more=f"Write it as one of: {'; '.join(_FORMS.values())}.")
    known: FaultKind = next(k for k in get_args(FaultKind) if k == kind)
    found = re.fullmatch(_PATTERNS[known], words, re.ASCII)
    if found is None:
        raise ConfigError(
            f"Cannot parse the fault {text!r}. Write it as: {_FORMS[known]}.", text=text, form=_FORMS[known]
        )
    given = found.groupdict()
    if len(given["step"]) > len(str(_LARGEST_STEP)) or len(given.get("target") or "") > 9:
        raise ConfigError(f"A number in {text!r} is too large.")
    return Fault(
        known,
        step=int(given["step"]),
        target=int(given["target"]) if given.get("target") else None,
        is_server=given.get("role") == "server",
        factor=float(given["factor"]) if given.get("factor") else None,
        delay_s=read_seconds(given["delay_s"]) if given.get("delay_s") else None,
        percent=float(given["percent"]) if given.get("percent") else None,
        for_s=read_seconds(given["for_s"]) if given.get("for_s") else None,
    )


def read_script(text: str) -> tuple[Fault, ...]:
    """Faults with semicolons or newlines between them."""
    return tuple(read_fault(part) for part in re.split(r"[;\n]", text) if part.strip())


def as_script(faults: Iterable[Fault]) -> str:
    return "; ".join(map(str, faults))


def read_seconds(text: str) -> float:
    """`3s`, `250ms` or `2min`, in seconds."""
    found = re.fullmatch(rf"({_NUMBER})\s*(ms|s|min)", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"Cannot parse {text!r} as a time. Write it as 3s, 250ms or 2min.", text=text)
    return float(found[1]) * _SECONDS[found[2]]


def _plain(value: float | None) -> str:
    """Without a decimal point if none is needed, otherwise with every digit, so that it parses as the same number."""
    assert value is not None, "only called with a value"
    return str(int(value)) if value == int(value) and value < 1e15 else repr(float(value))
