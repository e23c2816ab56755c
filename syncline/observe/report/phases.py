"""The time of each phase of a step: a bar per worker, or per run, and a table.

Pure functions from records to HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline.observe.formatting import duration
from syncline.observe.page.document import region, text
from syncline.observe.report.record import RunRecord
from syncline.telemetry.events import WAITING

_ORDER = ("data", "forward", "compute", "backward", "exchange", WAITING, "update")
_MEANING = {
    "data": "loading samples", "forward": "model outputs and loss", "backward": "gradients",
    "compute": "forward and backward in your own loop", "exchange": "with the other workers",
    WAITING: "waiting for other workers", "update": "optimizer step",
}  # fmt: skip
_MOST_ROWS = 16


class StepTime(NamedTuple):
    """Average seconds per step, by phase, in the order of a step."""

    name: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def step_times(runs: Sequence[RunRecord]) -> list[StepTime]:
    """Per worker of one run; for several runs, the mean over the workers of each."""
    if len(runs) == 1:
        workers = sorted(runs[0].workers.items())
        rows = [(f"worker {worker_id}", w.phases, w.steps) for worker_id, w in workers]
    else:
        rows = []
        for run in runs:
            total = dict[str, float]()
            for worker in run.workers.values():
                for name, seconds in worker.phases.items():
                    total[name] = total.get(name, 0.0) + seconds
            rows.append((run.name, total, sum(w.steps for w in run.workers.values())))
    return [StepTime(name, _in_order(spent, steps)) for name, spent, steps in rows if steps and spent]


def phases(runs: Sequence[RunRecord]) -> str:
    """The bars and the table, or a sentence if there is no data yet."""
    found = step_times(runs)
    if not found:
        return '<p class="nothing">No worker has reported a step yet.</p>'
    names = [name for name in _ORDER if any(name in row.seconds for row in found)]
    names += sorted({name for row in found for name in row.seconds} - set(names))
    longest = max(row.total for row in found)
    bars = "".join(_bar(row, names, longest) for row in found[:_MOST_ROWS])
    keys = "".join(
        f'<span><i class="{_kind(name)}"></i>{text(name)}<small>{text(_MEANING.get(name, ""))}</small></span>'
        for name in names
    )
    return (
        f'<figure><div class="stacks" aria-hidden="true">{bars}</div><figcaption class="phase-keys">{keys}</figcaption>'
        f"</figure>{_table(found, names)}{_more(len(found))}"
    )


def _in_order(spent: dict[str, float], steps: int) -> dict[str, float]:
    order = {name: i for i, name in enumerate(_ORDER)}
    return {n: spent[n] / steps for n in sorted(spent, key=lambda n: (order.get(n, len(order)), n))}


def _bar(row: StepTime, names: Sequence[str], longest: float) -> str:
    parts = "".join(
        f'<i class="{_kind(name)}" style="width:{100 * row.seconds[name] / longest:.3f}%" '
        f'title="{text(name)}: {duration(row.seconds[name])}"></i>'
        for name in names
        if name in row.seconds
    )
    return f"<span>{text(row.name)}</span><div>{parts}</div><b>{duration(row.total)}</b>"


def _table(found: Sequence[StepTime], names: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in ("", *names, "per step"))
    body = "".join(
        f'<tr><th scope="row">{text(row.name)}</th>'
        + "".join(_cell(name, row.seconds.get(name), row.total) for name in names)
        + f'<td data-label="per step"><b>{duration(row.total)}</b></td></tr>'
        for row in found[:_MOST_ROWS]
    )
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return region(table, "Time per step by phase")


def _cell(name: str, seconds: float | None, total: float) -> str:
    words = "–" if seconds is None else f"{duration(seconds)} <small>{100 * seconds / total:.0f}%</small>"
    return f'<td data-label="{text(name)}">{words}</td>'


def _more(rows: int) -> str:
    return f"<p>{rows - _MOST_ROWS} more not shown.</p>" if rows > _MOST_ROWS else ""


def _kind(name: str) -> str:
    return f"phase p-{name}" if name in _ORDER else "phase p-other"
