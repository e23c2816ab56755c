"""The report's section on a layout: what each worker holds of the model, how long it waits, and what it sends where.

Here: `layout`, a pure function of a run's record. Not here: the phases of a step in general (`phases.py`), and what a
layout is (`layouts/`).
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.observe.formatting import size
from syncline.observe.page.document import region, text
from syncline.observe.report.record import RunRecord, WorkerRecord
from syncline.telemetry.events import WAITING, HeldPart

_MOST_WORKERS = 64


def layout(run: RunRecord) -> str:
    """Who holds what; nothing if each worker holds the whole model."""
    if not run.parts:
        return ""
    name = text(run.state.plan.layout or str(run.plan.get("layout", "")))
    lead = (
        f"<p>{name}: parameters, summed gradients and optimizer state exist once per replica. Waiting is the time in "
        "which a worker could not compute: in a pipeline, the bubble.</p>"
    )
    shown = [name for name in ("shard", "stage", "slice") if any(getattr(part, name) for part in run.parts.values())]
    columns = ("holds", "state", "of replicated", "waiting", "sent inside replica", "between replicas")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "".join(
        f'<tr><th scope="row">worker {worker_id}</th>'
        + "".join(
            f'<td data-label="{column}">{cell}</td>'
            for column, cell in zip(columns, _cells(part, shown, run.workers.get(worker_id)), strict=True)
        )
        + "</tr>"
        for worker_id, part in sorted(run.parts.items())[:_MOST_WORKERS]
    )
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
    left_out = len(run.parts) - _MOST_WORKERS
    return lead + region(table, "Layout") + (f"<p>{left_out} more.</p>" if left_out > 0 else "")


def _place(part: HeldPart, shown: Sequence[str]) -> str:
    """Where a worker is in the grid: replica 1, stage 0 (h.0 to h.5)."""
    layers = f" ({part.layers})" if part.layers else ""
    within = "".join(f", {name} {getattr(part, name)}{layers if name == 'stage' else ''}" for name in shown)
    return f"replica {part.replica}{within}"


def _cells(part: HeldPart, shown: Sequence[str], worker: WorkerRecord | None) -> tuple[str, ...]:
    held = (text(_place(part, shown)), size(part.state), f"{part.state / part.whole:.0%}" if part.whole else "–")
    if worker is None or not worker.steps:
        return (*held, "–", "–", "–")
    spent, inside = sum(worker.phases.values()), worker.bytes_inside / worker.steps
    waiting = f"{worker.phases.get(WAITING, 0.0) / spent:.0%}" if spent else "–"
    between = max(0.0, worker.bytes_sent / worker.steps - inside)
    return (*held, waiting, f"{size(round(inside))} per step", f"{size(round(between))} per step")
