"""`--layout auto`: choosing between layouts, by memory first and by the predicted time of a step second. Pure.

Here: `candidates`, which a run on so many workers can have, `choose`, and `refuse`, the error for a layout that does
not fit, with the nearest that does. Not here: what a layout needs (`forecast.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError, plural
from syncline.layouts.forecast import PROGRAM_BYTES, Forecast, forecast
from syncline.layouts.layout import AUTO, Layout
from syncline.layouts.model_facts import ModelFacts
from syncline.layouts.pipeline import Pipeline
from syncline.layouts.sharded import Sharded
from syncline.layouts.tensor import Tensor

_AS_QUICK = 1.05
"""A simpler layout is chosen if its step takes at most so many times the quickest: predictions are no better."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that was looked at."""

    layout: Layout
    forecast: Forecast | None = None
    refused: str = ""
    """Why it cannot be had, if there is no forecast."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layout that was chosen, the reason, and all that were looked at."""

    chosen: Forecast
    reason: str
    candidates: tuple[Candidate, ...]
    limit: int | None = None
    """The bytes that a worker may use."""

    @property
    def layout(self) -> Layout:
        return self.chosen.layout

    def describe(self) -> list[str]:
        """The choice and a line for each candidate, for `syncline explain`."""
        return [
            f"--layout auto chose {self.layout}: {self.reason}.",
            *(_line(candidate, self.limit) for candidate in self.candidates),
        ]


def candidates(workers: int) -> list[Layout]:
    """The layouts of so many workers, the simplest first."""
    parts = [n for n in range(2, workers + 1) if workers % n == 0]
    found = [Layout()]
    if workers > 1:
        found.append(Layout.of(Sharded()))
    found += [Layout.of(Sharded(n)) for n in parts if n < workers]
    found += [Layout.of(Pipeline(n)) for n in parts]
    found += [Layout.of(Tensor(n)) for n in parts]
    found += [Pipeline(n) * Sharded(m) for n in parts for m in parts if n * m <= workers and workers % (n * m) == 0]
    return found


def look_at(
    layouts: Sequence[Layout],
    facts: ModelFacts,
    *,
    workers: int,
    batch: int,
    pieces: int = 1,
    limit: int | None = None,
    check: Callable[[Layout], None] | None = None,
) -> tuple[Candidate, ...]:
    """What each layout means for the run; `check` raises `ConfigError` for those that the run cannot have."""
    looked = []
    for layout in layouts:
        try:
            if check is not None:
                check(layout)
            predicted = forecast(layout, facts, workers=workers, batch=batch, pieces=pieces, limit=limit)
            looked.append(Candidate(layout=layout, forecast=predicted))
        except ConfigError as error:
            why = str(error).removeprefix(f"--layout {layout} is not possible: ").partition(". Use ")[0]
            looked.append(Candidate(layout=layout, refused=why))
    return tuple(looked)


def choose(found: Sequence[Candidate], *, limit: int | None, host_bytes: int | None = None) -> Choice:
    """The layout with the shortest predicted step of those that fit into memory; `ConfigError` if none does.

    `limit` is what a worker may use, `host_bytes` what all of them may use besides their programs.
    """
    possible = [candidate.forecast for candidate in found if candidate.forecast is not None]
    fitting = [one for one in possible if one.fits(limit) and (not host_bytes or one.host_bytes <= host_bytes)]
    if not fitting:
        raise _none_fits(found, limit, host_bytes)
    quickest = min(one.step_s for one in fitting)
    chosen = next(one for one in fitting if one.step_s <= _AS_QUICK * quickest)
    return Choice(chosen=chosen, reason=_reason(chosen, fitting, possible, limit), candidates=tuple(found), limit=limit)


def refuse(predicted: Forecast, found: Sequence[Candidate], limit: int) -> ConfigError:
    """The error for a layout that needs more memory than a worker may use, with the nearest that fits."""
    fitting = [one for c in found if (one := c.forecast) is not None and one.fits(limit)]
    layout = predicted.layout
    nearest = min(
        fitting, key=lambda one: _distance(layout, one.layout), default=None
    )  # of equals the first, which is the simplest
    need = predicted.largest
    fix = (
        f'Use --layout "{nearest.layout}", which needs {_megabytes(nearest.largest.total)}'
        if nearest is not None
        else f"No layout of {predicted.grid.workers} workers fits; the smallest needs "
        f"{_megabytes(min((c.forecast.largest.total for c in found if c.forecast is not None), default=need.total))}"
    )
    return ConfigError(
        f"memory_limit is {_megabytes(limit)}, but a worker needs about {_megabytes(need.total)} with "
        f"--layout {layout}: {describe_need(predicted)}. {fix}. Or set a larger --memory-limit, add "
        "--checkpoint-activations, or use a smaller model.",
        code="memory-limit",
        layout=str(layout),
        reason="memory",
        limit_bytes=limit,
        needed_bytes=need.total,
        nearest=str(nearest.layout) if nearest is not None else None,
        nearest_bytes=nearest.largest.total if nearest is not None else None,
    )


def describe_fit(predicted: Forecast, limit: int) -> str:
    """One sentence on a layout that fits."""
    need = predicted.largest
    pieces = plural(predicted.micro_batches, "micro-batch", "micro-batches")
    return (
        f"--layout {predicted.layout}: a worker needs about {_megabytes(need.total)} of {_megabytes(limit)} with "
        f"{pieces} per step."
    )


def describe_need(predicted: Forecast) -> str:
    """What the worker that needs the most holds."""
    need = predicted.largest
    held = (
        f"{_megabytes(need.parameters)} of parameters, {_megabytes(need.gradients)} of gradients, "
        f"{_megabytes(need.optimizer)} of optimizer state, {_megabytes(need.activations)} of activations, "
        f"{_megabytes(need.exchange)} for exchanging, and {_megabytes(PROGRAM_BYTES)} for the program"
    )
    if need.start > need.state + need.activations + need.exchange:
        return f"{_megabytes(need.start)} while it builds the whole model, more than in a step; {held}"
    return held


def _distance(wanted: Layout, other: Layout) -> int:
    """In how many parts two layouts differ; the kind of a part counts more than its number."""
    distance = 0
    for mine, its in zip(
        (wanted.pipeline, wanted.tensor, wanted.sharded), (other.pipeline, other.tensor, other.sharded), strict=True
    ):
        if (mine is None) != (its is None):
            distance += 10
        elif mine != its:
            distance += 1
    return distance


def _reason(chosen: Forecast, fitting: Sequence[Forecast], possible: Sequence[Forecast], limit: int | None) -> str:
    size, step = _megabytes(chosen.largest.total), f"{1e3 * chosen.step_s:,.3g} ms"
    within = f" of {_megabytes(limit)}" if limit is not None else ""
    left_out = len(possible) - len(fitting)
    quickest = min(fitting, key=lambda one: one.step_s)
    why = "the shortest predicted step" if chosen is quickest else (
        f"the simplest layout within {_AS_QUICK - 1:.0%} of the shortest predicted step ({quickest.layout})"
    )  # fmt: skip
    others = f" of the {len(fitting)} layouts that fit into memory ({left_out} do not)" if left_out else ""
    return f"{step} per step, {why}{others}; {size}{within} per worker"


def _none_fits(found: Sequence[Candidate], limit: int | None, host_bytes: int | None) -> ConfigError:
    possible = [candidate.forecast for candidate in found if candidate.forecast is not None]
    smallest = min(possible, key=lambda one: one.largest.total)
    least = min(possible, key=lambda one: one.host_bytes)
    if limit is not None and not any(one.fits(limit) for one in possible):
        return refuse(smallest, found, limit)
    return ConfigError(
        f"No layout fits: together the workers need at least {_megabytes(least.host_bytes)} with --layout "
        f"{least.layout}, and {_megabytes(host_bytes or 0)} are free on this machine. Use fewer --workers, a smaller "
        "--batch, --checkpoint-activations, or a smaller model.",
        code="memory-limit", layout=AUTO, reason="host-memory", nearest=None, limit_bytes=host_bytes,
        needed_bytes=least.host_bytes,
    )  # fmt: skip


def _line(candidate: Candidate, limit: int | None) -> str:
    found = candidate.forecast
    if found is None:
        return f"  {candidate.layout}: not possible, {candidate.refused}"
    need = found.largest
    verdict = "" if found.fits(limit) else "; does not fit"
    pipeline = f", bubble {found.bubble:.0%}, balance {found.balance:.0%}" if found.grid.stages > 1 else ""
    return (
        f"  {candidate.layout}: {_megabytes(need.total)} per worker ({_megabytes(need.state)} of parameters, gradients "
        f"and optimizer state, {_megabytes(need.activations)} of activations), {1e3 * found.step_s:,.3g} ms per step, "
        f"{_megabytes(found.moved_bytes)} sent{pipeline}{verdict}"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 10e6 else f"{count / 1e6:,.0f} MB"
