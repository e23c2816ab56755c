"""Which strategies a run could use, predicted and put in order. Pure.

Here: `candidates` and `TrainingPlan`, with its table. Not here: what a prediction is made of (`step.py`), and measuring
the profile that it is made from (`syncline/measuring.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import ConfigError, UnknownName, plural
from syncline.layouts.choice import Candidate
from syncline.planning.cost.layouts import predict_layout
from syncline.planning.cost.network import Network
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.step import Prediction, Workload, predict
from syncline.planning.cost.target import Target
from syncline.planning.cost.why import in_full, in_one_line
from syncline.strategies.method import Method, RunConditions, size
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy

__all__ = ["TrainingPlan"]

_UNDECLARED = "it declares neither bytes_per_step nor traffic, so only a run can show its speed"

_AS_QUICK = 1.05
"""The usual layout is the best if its step takes at most so many times the quickest: predictions are no better."""
_DIFFERENT = "These train differently: compare their accuracy, too. In order of speed; samples: how many times as many."
_HEAD: tuple[str, ...] = ("", "strategy", "layout", "step", "samples/s", "bytes/step", "memory", "samples", "why")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Predictions for all strategies that a run could use, best first, and why the others cannot be used.

    Strategies whose result is that of one process come first: between them speed decides. The others train differently,
    so they may need more or fewer samples for the same accuracy; they are in order of speed alone.
    """

    model: str
    data: str
    predictions: tuple[Prediction, ...]
    refused: dict[str, str]
    notes: tuple[str, ...] = ()
    target: Target | None = None
    """The accuracy that was asked for."""

    @property
    def best(self) -> Prediction:
        """The fastest of those whose result is that of one process; `replicated`, unless another layout is clearly."""
        first = self.predictions[0]
        same = (p for p in self.predictions if p.is_exact and p.layout == "replicated")
        return next((p for p in same if p.step_s.mid <= _AS_QUICK * first.step_s.mid), first)

    @property
    def fastest(self) -> Prediction:
        """The fastest of all, by samples per second."""
        return max(self.predictions, key=lambda each: each.samples_per_s.mid)

    def why(self, strategy: str, layout: str | None = None) -> str:
        """Why this strategy is predicted as it is, term by term, or why it cannot be used.

        Without a `layout`: with the first one that it was predicted with, `replicated` if that is one.
        """
        for each in sorted(self.predictions, key=lambda each: each.layout != "replicated"):
            if each.strategy == strategy and layout in (None, each.layout):
                baseline = self._baseline
                return f"{in_full(each)}\n  {in_one_line(each, baseline)}"
        name = strategy if layout in (None, "replicated") else f"{strategy}, {layout}"
        if name in self.refused:
            return f"{name} cannot be used: {self.refused[name]}"
        raise UnknownName.among("strategy in this plan", name, [*(name_of(p) for p in self.predictions)])

    def table(self) -> str:
        """All predictions as text; `>` marks the best."""
        rows = [_head(self.target)]
        rows += [self._row(each) for each in self.predictions if each.is_exact]
        others = [self._row(each) for each in self.predictions if not each.is_exact]
        widths = [max(len(row[column]) for row in [*rows, *others]) for column in range(len(rows[0]) - 1)]
        lines = [_line(row, widths) for row in rows]
        if others:
            lines += [
                "",
                _DIFFERENT,
            ]
            lines += [_line(row, widths) for row in others]
        lines += ["", *(f"{name}: not possible. {why}" for name, why in self.refused.items())] if self.refused else []
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "data": self.data,
            "best": self.best.strategy,
            "best_layout": self.best.layout,
            "fastest": self.fastest.strategy,
            "predictions": [{**p.to_dict(), "why": in_one_line(p, self._baseline)} for p in self.predictions],
            "refused": self.refused,
            "notes": list(self.notes),
            **({"target": self._target_data(self.target)} if self.target is not None else {}),
        }

    def seconds_to_target(self, strategy: str) -> Range | None:
        """How long a run with this strategy takes to the target; None without one, or if that is unknown."""
        found = next((p for p in self.predictions if p.strategy == strategy and p.layout == "replicated"), None)
        if found is None:
            raise UnknownName.among("strategy in this plan", strategy, [p.strategy for p in self.predictions])
        return self.target.seconds(found) if self.target is not None else None

    def _target_data(self, target: Target) -> dict[str, Any]:
        seconds = {name_of(p): found.to_dict() for p in self.predictions if (found := target.seconds(p)) is not None}
        samples = None if target.samples is None else target.samples.to_dict()
        return {"accuracy": target.accuracy, "samples": samples, "seconds": seconds, "source": target.source}

    @property
    def _baseline(self) -> Prediction | None:
        """What others are compared with."""
        usual = (each for each in self.predictions if each.strategy == "allreduce" and each.layout == "replicated")
        return next(usual, None)

    def _row(self, each: Prediction) -> tuple[str, ...]:
        mark = ">" if each == self.best else ""
        return (
            mark, each.strategy, each.layout, _time(each.step_s), f"{each.samples_per_s.mid:,.0f}",
            size(each.bytes_per_step), _megabytes(each.memory_bytes),
            "?" if each.samples is None else f"{each.samples.mid:.2f}x",
            *([] if self.target is None else [_to_target(self.target, each)]), in_one_line(each, self._baseline),
        )  # fmt: skip


def make_training_plan(
    workload: Workload,
    network: Network,
    *,
    model: str,
    data: str,
    strategies: Iterable[str],
    conditions: RunConditions,
    layouts: Sequence[Candidate] = (),
    notes: Sequence[str] = (),
    target: Target | None = None,
) -> TrainingPlan:
    """Predict each strategy, and those that fit between replicas with each of the layouts, and put them in order."""
    found: list[Prediction] = []
    refused: dict[str, str] = {}
    for name in strategies:
        method = read_strategy(name).method
        try:
            method.check_run(conditions)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        prediction = predict(workload, name, method, network)
        if prediction is None:
            refused[name] = _UNDECLARED
        else:
            found.append(prediction)
            others, impossible = _with_layouts(prediction, method, layouts, workload, network)
            found += others
            refused |= impossible
    if not found:
        raise ConfigError(
            f"None of {plural(len(refused), 'strategy', 'strategies')} can be used: "
            + " ".join(f"{name}: {why}" for name, why in refused.items()),
            code="nothing-to-plan", refused=refused,
        )  # fmt: skip
    found.sort(key=lambda each: (not each.is_exact, each.step_s.mid))
    return TrainingPlan(
        model=model, data=data, predictions=tuple(found), refused=refused, notes=tuple(notes), target=target
    )


def _with_layouts(
    replicated: Prediction, method: Method, layouts: Sequence[Candidate], workload: Workload, network: Network
) -> tuple[list[Prediction], dict[str, str]]:
    """Predictions with the other layouts that were looked at. Only sums of exact gradients are divided by a layout."""
    if not method.sums_exact_gradients:
        return [], {}
    usual = next((each.forecast for each in layouts if each.layout.is_replicated), None)
    found, refused = [], {}
    for each in layouts:
        if each.layout.is_replicated or usual is None:
            continue
        if each.forecast is None:
            refused[f"{replicated.strategy}, {each.layout}"] = f"{each.refused}."
        else:
            found.append(predict_layout(replicated, each.forecast, usual, workload, network))
    return found, refused


def all_strategies() -> list[str]:
    """The named ones, as they are written."""
    return [preset.name for preset in PRESETS.values()]


def _head(target: Target | None) -> tuple[str, ...]:
    return _HEAD if target is None else (*_HEAD[:-1], f"to {100 * target.accuracy:g}%", _HEAD[-1])


def _to_target(target: Target, each: Prediction) -> str:
    found = target.seconds(each)
    return "?" if found is None else f"{_duration(found.mid)} ({_duration(found.low)} to {_duration(found.high)})"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def name_of(each: Prediction) -> str:
    """The strategy, and the layout if it is not the usual one."""
    return each.strategy if each.layout == "replicated" else f"{each.strategy}, {each.layout}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [f"{cell:<{width}}" for cell, width in zip(row[:3], widths[:3], strict=True)]
    cells += [f"{cell:>{width}}" for cell, width in zip(row[3:-1], widths[3:], strict=True)]
    return "  ".join([*cells, row[-1]]).rstrip()


def _time(seconds: Range) -> str:
    ms = 1e3 * seconds.mid
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _megabytes(memory: Range) -> str:
    return f"{memory.mid / 1e6:,.0f} MB" if memory.mid else "?"
