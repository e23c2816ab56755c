"""Why a prediction is what it is, rendered from its terms: every number in the text is one of theirs."""

from __future__ import annotations

from syncline.planning.cost.ranges import Range
from syncline.planning.cost.step import Prediction, TermName

_SMALL = 0.02
"""Parts of a step that are smaller are not mentioned in one line."""
_WORDS: dict[TermName, str] = {
    "data": "waiting for data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "compute": "computing",
    "update": "the optimizer",
    "encoding": "encoding and decoding",
    "exchange": "the exchange",
    "waiting": "waiting for the slowest worker",
    "scoring": "scoring models",
}
_OVERHEAD: tuple[TermName, ...] = ("exchange", "encoding", "waiting", "scoring", "data")


def in_one_line(prediction: Prediction, baseline: Prediction | None = None) -> str:
    """For the table: what a step loses most time with, and how it compares with the `baseline`."""
    parts = sorted(((prediction.part(name), name) for name in _OVERHEAD), reverse=True)
    said = [f"{_percent(part)} of a step is {_WORDS[name]}" for part, name in parts[:2] if part >= _SMALL]
    if not said:
        computing = 1 - sum(part for part, _ in parts)
        said = [f"{_percent(computing)} of a step is computing"]
    every = max((term.facts.get("every", 1.0) for term in prediction.terms), default=1.0)
    if every > 1:
        said.append(f"exchanges every {every:.3g} steps")
    if baseline is not None and baseline != prediction:
        ratio = prediction.samples_per_s.mid / baseline.samples_per_s.mid
        said.append(_compared(ratio, baseline.strategy))
    return "; ".join(said)


def in_full(prediction: Prediction) -> str:
    """Term by term: seconds with their range, and their part of the step."""
    step = prediction.step_s
    rows: list[tuple[str, str, str]] = [
        (term.name, _ms(term.seconds), _percent(term.seconds.mid / step.mid)) for term in prediction.terms
    ]
    rows.append(("step", _ms(step), "100%"))
    width = max(len(ms) for _, ms, _ in rows)
    title = f"{prediction.strategy}, {prediction.layout}, {prediction.workers} workers"
    lines = [f"{title}: {prediction.samples_per_s.mid:,.0f} samples/s"]
    return "\n".join([*lines, *(f"  {name:<9} {ms:>{width}} ms  {part:>4}" for name, ms, part in rows)])


def _compared(ratio: float, strategy: str) -> str:
    if abs(ratio - 1) < _SMALL:
        return f"as fast as {strategy}"
    if ratio >= 2:
        return f"{ratio:.2g} times as fast as {strategy}"
    return f"{_percent(abs(ratio - 1))} {'faster' if ratio > 1 else 'slower'} than {strategy}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _ms(seconds: Range) -> str:
    def number(value: float) -> str:
        ms = 1e3 * value
        return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"

    return f"{number(seconds.mid)} ({number(seconds.low)} to {number(seconds.high)})"
