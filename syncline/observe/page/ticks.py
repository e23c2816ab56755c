"""Round numbers along an axis, and how they are written. Pure functions."""

from __future__ import annotations

import math

_SECONDS = (1, 2, 5, 10, 15, 30)
_STEPS_S = (*_SECONDS, *(60 * s for s in _SECONDS), *(3600 * h for h in (1, 2, 3, 6, 12, 24)))


def step_between(low: float, high: float, most: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten of which at most `most` multiples lie from `low` to `high`."""
    least = (high - low) / (most - 1)
    decade = 10.0 ** math.floor(math.log10(least))
    return next(m * decade for m in (1, 2, 5, 10) if m * decade >= least * (1 - 1e-9))


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of a round step from `low` to `high`, at most `most` of them."""
    step = step_between(low, high, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def round_times(low: float, high: float, most: int) -> list[float]:
    """The same for seconds: beyond a minute, whole minutes and hours are round."""
    least = (high - low) / (most - 1)
    if least < 1 or least > _STEPS_S[-1]:
        return round_numbers(low, high, most)
    step = next(s for s in _STEPS_S if s >= least)
    return [float(number * step) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def clock(seconds: float) -> str:
    """A moment of a run, short: `45 s`, `3:05`, `2:07:00`."""
    whole = round(seconds)
    if whole < 60:
        return f"{label(round(seconds, 1))} s"
    hours, rest = divmod(whole, 3600)
    minutes = f"{rest // 60:02}" if hours else f"{rest // 60}"
    return f"{f'{hours}:' if hours else ''}{minutes}:{rest % 60:02}"


def label(value: float) -> str:
    """As short as it can be."""
    if value == 0:
        return "0"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else f"{value:,.0f}" if 1 <= abs(value) < 1e8 else f"{value:.0e}"
