"""What is simulated: how long steps take, how workers straggle and fail, and what a failure costs.

Here: the types, and reading them from text. Not here: the passing of time (`pace.py`, `outages.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import ConfigError

_UNITS = {"ms": 1e-3, "s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0,
          "d": 86400.0, "day": 86400.0, "week": 7 * 86400.0}  # fmt: skip
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often workers fail, and how the run continues."""

    mean_s: float = float("inf")
    """Mean time between failures of one worker."""
    in_place: bool = True
    """Whether the others continue with a replacement and repeat the step in flight; else all restart."""
    repair_s: float = 0.5
    """How long the others stand still, or how long a restart takes."""
    checkpoint_s: float = 1.0
    """How long a checkpoint stops the run."""
    interval_s: float | None = None
    """From one checkpoint to the next; None: the best."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run to simulate."""

    workers: int
    steps: int
    compute_s: float
    """A worker's step, without stragglers."""
    straggling: float = 0.0
    """Deviation of the logarithm of a worker's time of a step."""
    failures: Failures = Failures()
    share: float = 1.0
    """Samples of a worker's step."""
    seed: int = 0


def seconds_of(text: str) -> float:
    """A duration such as '40ms', '2 h' or '30 days'."""
    found = re.fullmatch(_NUMBER + r"\s*([a-z]+)", text.strip().lower())
    unit = found[2] if found and found[2] in _UNITS else found[2].removesuffix("s") if found else ""
    if found is None or unit not in _UNITS:
        raise ConfigError(
            f"{text!r} is no duration. Write a number and one of ms, s, min, h, days, such as '40ms' or '30 days'.",
            code="duration", value=text,
        )  # fmt: skip
    return float(found[1]) * _UNITS[unit]


def straggling_of(text: str) -> float:
    """The deviation in 'lognormal(0.3)', or 0 for 'none'."""
    found = re.fullmatch(rf"lognormal\(\s*{_NUMBER}\s*\)", text.strip().lower())
    if text.strip().lower() == "none":
        return 0.0
    if found is None or float(found[1]) > 3:
        raise ConfigError(
            f"--stragglers {text!r} is not known. Write none, or lognormal(0.3): the logarithm of a worker's time of a "
            "step varies with this standard deviation, at most 3.",
            code="stragglers", value=text,
        )  # fmt: skip
    return float(found[1])


def mean_time_between_failures(text: str) -> float:
    """Seconds between two failures of one worker, from '1 per worker per 30 days'; infinite for 'none'."""
    if text.strip().lower() == "none":
        return float("inf")
    found = re.fullmatch(rf"{_NUMBER}\s+per\s+worker\s+per\s+(.+)", text.strip().lower())
    if found is None or not float(found[1]):
        raise ConfigError(
            f"--failures {text!r} is not known. Write none, or how often a worker fails, such as '1 per worker per 30 "
            "days'.",
            code="failures", value=text,
        )  # fmt: skip
    period = found[2] if found[2][0].isdigit() else f"1 {found[2]}"
    return seconds_of(period) / float(found[1])
