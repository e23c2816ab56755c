"""`--strategy auto`: which of the predicted strategies a run gets, and what to say of the choice. Pure.

Here: reading `auto`, `auto(exact)` and `auto(adapt)`, and `pick`. Not here: the predictions (`choice.py`), measuring
for them (`syncline/measuring.py`), and choosing again during a run (`planning/adviser.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError
from syncline.planning.cost.choice import TrainingPlan
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.samples import MEASURED
from syncline.planning.cost.step import Prediction
from syncline.planning.cost.why import in_one_line

_AUTO = re.compile(r"\s*auto\s*(?:\(\s*(?P<mode>[^()]*?)\s*\))?\s*")
_MODES = ("", "exact", "adapt")
_WORTH = 0.95
"""A strategy that trains differently must be expected to take at most this part of the best exact one's time."""
_AS_GOOD = 1.02
"""Of exact strategies, the usual one is preferred if it is as good as the quickest: predictions are no better."""
_USUAL = "allreduce"


def is_auto_strategy(text: str) -> bool:
    """Whether the strategy is to be chosen. What is between the parentheses is checked by `read_mode`."""
    return _AUTO.fullmatch(text) is not None


def read_mode(text: str) -> str:
    """What is between the parentheses: nothing, exact or adapt."""
    found = _AUTO.fullmatch(text)
    mode = (found["mode"] or "") if found else None
    if mode not in _MODES:
        raise ConfigError(
            f"--strategy {text} is not possible: auto chooses among all strategies, auto(exact) among those that "
            "compute what one process would, and auto(adapt) again when conditions change. Use one of these.",
            code="auto-strategy", strategy=text, reason="mode", allowed=["auto", "auto(exact)", "auto(adapt)"],
        )  # fmt: skip
    return mode


def cannot_choose(text: str, why: str, reason: str) -> ConfigError:
    """The error where nothing can be chosen."""
    return ConfigError(
        f"--strategy {text} is not possible: {why}. Name a strategy, such as --strategy allreduce.",
        code="auto-strategy", strategy=text, reason=reason, nearest=_USUAL,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The chosen strategy, and the best whose result is that of one process."""

    chosen: Prediction
    exact: Prediction
    plan: TrainingPlan
    wants_exact: bool

    def describe(self) -> list[str]:
        """What was chosen, what it costs in samples, and the alternative: sentences for the log of the run."""
        chosen, exact = self.chosen, self.exact
        asked = "auto(exact)" if self.wants_exact else "auto"
        baseline = next((each for each in self.plan.predictions if each.strategy == _USUAL), None)
        why = in_one_line(chosen, baseline)
        lines = [f"--strategy {asked} chose {chosen.strategy}: {_time(chosen.step_s)} per step; {why}."]
        if chosen.is_exact:
            lines.append(f"{chosen.strategy} computes what one process would, so it needs no more samples.")
            if not self.wants_exact:
                lines.append(self._why_no_other())
        else:
            lines.append(
                f"{chosen.strategy} trains differently: it needs {samples_text(chosen.samples)} ({MEASURED}), which "
                "this model may not follow. Compare its accuracy."
            )
            lines.append(
                f"The best strategy that computes what one process would is {exact.strategy}, "
                f'{_time(exact.step_s)} per step. To choose among those only: --strategy "auto(exact)".'
            )
        return lines

    def _why_no_other(self) -> str:
        others = [each for each in self.plan.predictions if not each.is_exact and each.samples is not None]
        if not others:
            return "No strategy that trains differently can be used here, or is known well enough."
        best = min(others, key=_cost)
        return (
            f"Of those that train differently, {best.strategy} is the most promising: {_time(best.step_s)} per step, "
            f"but it needs {samples_text(best.samples)} ({MEASURED})."
        )


def pick(plan: TrainingPlan, *, exact_only: bool) -> Pick:
    """The strategy with the shortest expected time to the same accuracy.

    One that trains differently is chosen only if it is worth it even with as many samples as it may need at most.
    """
    exact = _best_exact([each for each in plan.predictions if each.is_exact and each.layout == "replicated"])
    if exact is None:
        raise cannot_choose("auto", "no strategy that computes what one process would can be used here", "no-exact")
    known = [each for each in plan.predictions if each.samples is not None and not each.is_exact]
    worth = [each for each in known if _cost(each, at_most=True) < _WORTH * _cost(exact)]
    chosen = min(worth, key=_cost, default=exact) if not exact_only else exact
    return Pick(chosen=chosen, exact=exact, plan=plan, wants_exact=exact_only)


def _best_exact(found: Sequence[Prediction]) -> Prediction | None:
    best = min(found, key=_cost, default=None)
    usual = next((each for each in found if each.strategy == _USUAL), None)
    return usual if best is not None and usual is not None and _cost(usual) <= _AS_GOOD * _cost(best) else best


def _cost(prediction: Prediction, *, at_most: bool = False) -> float:
    """Seconds for the progress that one process makes with one sample."""
    factor = prediction.samples or Range.exactly(1.0)
    return prediction.step_s.mid / prediction.batch * (factor.high if at_most else factor.mid)


def samples_text(factor: Range | None) -> str:
    """`about 10% more samples than one process (5% fewer to 30% more)`."""
    if factor is None:
        return "an unknown number of samples"
    if factor.low == factor.high == 1.0:
        return "as many samples as one process"
    middle = "about as many samples as one process" if abs(factor.mid - 1) < 0.02 else (
        f"about {_more(factor.mid)} samples than one process"
    )  # fmt: skip
    return f"{middle} ({_more(factor.low)} to {_more(factor.high)})"


def _more(factor: float) -> str:
    if factor >= 2:
        return f"{factor:.2g} times as many"
    return f"{100 * abs(factor - 1):.0f}% {'more' if factor >= 1 else 'fewer'}"


def _time(seconds: Range) -> str:
    ms = 1e3 * seconds.mid
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
