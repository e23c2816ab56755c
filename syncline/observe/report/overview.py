"""The sections of a report that are text and tables: status, key figures, workers, timeline, plan, machine.

Pure functions from records to HTML. Not here: charts (`curves.py`, `phases.py`), the order of sections
(`report_page.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.observe.formatting import (
    cause_first,
    count,
    duration,
    is_accuracy,
    metric,
    metrics_in_order,
    number,
    peak_memory,
    rate,
    size,
)
from syncline.observe.page.document import region, text
from syncline.observe.page.ticks import clock
from syncline.observe.report.curves import COLORS, axis_marks
from syncline.observe.report.record import RunRecord, Status
from syncline.planning.plan import Plan

_BADGES: dict[Status, tuple[str, str]] = {
    "finished": ("met", "✓ finished"), "running": ("live", "● training"), "starting": ("unjudged", "starting"),
    "stopped": ("unjudged", "stopped, work saved"), "failed": ("failed", "✗ failed"), "killed": ("failed", "✗ killed"),
    "crashed": ("failed", "✗ crashed"), "empty": ("unjudged", "no events yet"),
}  # fmt: skip
_WORKER_BADGES = {
    "training": ("live", "● training"), "finished": ("met", "✓ finished"), "failed": ("failed", "✗ failed"),
    "starting": ("unjudged", "○ starting"),
}  # fmt: skip
_MOST_WORKERS = 32
_MOST_ENTRIES = 60
_MOST_FIGURES = 4


def badge(run: RunRecord) -> str:
    """The status of the run."""
    kind, words = _BADGES[run.status]
    return f'<span class="badge {kind}">{words}</span>'


def subtitle(run: RunRecord) -> str:
    """`2 workers · allreduce · step 120 of 120`."""
    state = run.state
    total = f" of {state.plan.total_steps:,}" if state.plan.total_steps and not state.plan.is_own_loop else ""
    step = f"step {state.step:,}{total}" if state.has_steps else "trained with torch.distributed by the script itself"
    parts = [*state.title[1:], step] if run.events else ["no events yet"]
    if run.status == "running" and state.left_s is not None:
        parts.append(f"{duration(state.left_s)} left")
    return " · ".join(text(part) for part in parts)


def figures(run: RunRecord) -> str:
    shown = [(name, metric(name, value)) for name, value in metrics_in_order(run.metrics)[:_MOST_FIGURES]]
    if run.samples_per_s > 0:
        shown.append(("samples per second", rate(run.samples_per_s)))
    if run.seconds > 0:
        shown.append(("time", duration(run.state.summary.seconds if run.state.summary else run.seconds)))
    memory = run.peak_memory_bytes
    if memory:
        shown.append(("peak memory per worker", size(max(memory.values()))))
    if not shown:
        return ""
    return f'<dl class="tiles">{"".join(f"<div><dt>{text(n)}</dt><dd>{text(v)}</dd></div>" for n, v in shown)}</dl>'


def ending(run: RunRecord) -> str:
    """Why a run did not complete, and how to resume it."""
    status, ended = run.status, run.state.ended
    if status == "crashed":
        return (
            '<p class="note">The run ended without a final event: its driver was killed, or the machine went down. '
            f"To {'resume from its last checkpoint' if run.state.has_steps else 'start the script again'}: "
            f"<code>syncline resume {text(run.state.run_dir or run.name)}</code></p>"
        )
    if ended is None or status in ("finished", "running", "starting"):
        return ""
    if status == "failed":
        lines = text("\n".join(cause_first(ended.message, run.state.failures)))
        return f'<div class="cause"><h2>Cause of failure</h2><pre tabindex="0">{lines}</pre></div>'
    return f'<p class="note">{text(ended.message)}</p>'


def comparison(runs: Sequence[RunRecord]) -> str:
    """One table: the final metrics of several runs, and the settings in which they differ."""
    names = [n for n, _ in metrics_in_order({name: 0.0 for run in runs for name in run.metrics})]
    columns: list[tuple[str, list[str]]] = [("status", [badge(run) for run in runs])]
    for key in _differing(runs):
        columns.append((key, [text(_setting(run, key)) for run in runs]))
    for name in names[: _MOST_FIGURES + 2]:
        columns.append((name, _best_marked(name, [run.metrics.get(name) for run in runs])))
    columns += [
        ("samples/s", [rate(run.samples_per_s) if run.samples_per_s > 0 else "–" for run in runs]),
        ("steps", [f"{run.state.step:,}" for run in runs]),
        ("time", [duration(run.seconds) for run in runs]),
        ("peak memory", [size(max(m.values())) if (m := run.peak_memory_bytes) else "–" for run in runs]),
    ]
    head = "".join(f'<th scope="col">{text(name)}</th>' for name, _ in columns)
    rows = "".join(
        f'<tr><th scope="row"><span class="run c{i % COLORS}"><i></i>{text(run.name)}</span></th>'
        + "".join(f'<td data-label="{text(name)}">{cells[i]}</td>' for name, cells in columns)
        + "</tr>"
        for i, run in enumerate(runs)
    )
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return region(table, "Final metrics of the runs")


def workers(run: RunRecord) -> str:
    """Each worker with its status and throughput."""
    known = sorted(run.state.workers.items())
    if not known:
        return '<p class="nothing">No worker has started yet.</p>'
    memory = run.peak_memory_bytes
    rows = []
    for worker_id, worker in known[:_MOST_WORKERS]:
        status = worker.status
        if status in ("training", "starting") and run.status not in ("running", "starting"):
            kind, words = "unjudged", "ended"
        else:
            kind, words = _WORKER_BADGES[status]
        cells = {
            "status": f'<span class="badge {kind}">{words}</span>', "step": f"{worker.step:,}",
            "samples/s": rate(worker.samples_per_s) if worker.samples_per_s > 0 else "–",
            **({"peak memory": size(memory[worker_id]) if worker_id in memory else "–"} if memory else {}),
        }  # fmt: skip
        shown = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells.items())
        rows.append(f'<tr><th scope="row">worker {worker_id}</th>{shown}</tr>')
    columns = ["status", "step", "samples/s", *(["peak memory"] if memory else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    more = f"<p>{len(known) - _MOST_WORKERS} more.</p>" if len(known) > _MOST_WORKERS else ""
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return region(table, "Workers") + more


def timeline(run: RunRecord) -> str:
    """Failures, changes, warnings and notes; marks on the time axis have the same number here."""
    if not run.marks:
        return '<p class="nothing">No failures, changes or warnings.</p>'
    numbers = {id(mark): n for n, mark in axis_marks(run)}
    rows = "".join(
        f'<tr><td class="when">{clock(m.time_s)}</td><td class="when">step {m.step:,}</td>'
        f'<td><span class="kind k-{m.kind}">{numbers.get(id(m), "")} {m.kind}</span></td>'
        f"<td>{text(m.text)}</td></tr>"
        for m in run.marks[-_MOST_ENTRIES:]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("time", "step", "type", "event"))
    left_out = len(run.marks) - _MOST_ENTRIES
    more = f"<p>{left_out:,} earlier entries are in events.jsonl.</p>" if left_out > 0 else ""
    return f'{more}<table class="timeline"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def plan(run: RunRecord) -> str:
    """The plan as sentences; its raw settings if another version of Syncline made it."""
    try:
        description = Plan.from_dict(run.plan).describe()
    except (msgspec.ValidationError, TypeError, KeyError, IndexError):
        return _facts({k: str(v) for k, v in run.plan.items() if isinstance(v, (str, int, float)) and v != ""})
    sentences = "".join(f"<p>{text(line)}</p>" for line in description.splitlines())
    parameters = f"<p>The model has {run.parameters:,} parameters.</p>" if run.parameters else ""
    return sentences + parameters


def machine(run: RunRecord) -> str:
    """The machine and its use."""
    facts: dict[str, str] = {}
    known: dict[str, Any] = run.machine
    if known.get("host"):
        facts["host"] = str(known["host"])
    if isinstance(cores := known.get("cores"), int):
        facts["processor"] = f"{known.get('processor', '')}, {count(cores, 'core')}".strip(", ")
    if isinstance(available := known.get("memory_available_bytes"), int):
        facts["memory available"] = size(available)
    if known.get("python"):
        facts["Python"] = str(known["python"])
    memory = peak_memory(run.peak_memory_bytes)
    if memory is not None:
        facts["peak memory"] = memory
    if run.state.checkpoint is not None:
        facts["last checkpoint"] = f"step {run.state.checkpoint.step:,}, {size(run.state.checkpoint.bytes)}"
    return _facts(facts) if facts else '<p class="nothing">No data yet.</p>'


def _facts(facts: dict[str, str]) -> str:
    listed = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{listed}</dl>'


def _differing(runs: Sequence[RunRecord]) -> list[str]:
    """The settings in which the runs differ."""
    keys = ("model", "data", "strategy", "layout", "workers", "batch", "epochs", "seed", "precision", "memory_format")
    return [key for key in keys if len({_setting(run, key) for run in runs}) > 1]


def _setting(run: RunRecord, key: str) -> str:
    value = run.plan.get(key, "–")
    return str(len(value)) if isinstance(value, (list, tuple)) else str(value)


def _best_marked(name: str, values: Sequence[float | None]) -> list[str]:
    """The best is bold, for accuracies and losses."""
    known = [v for v in values if v is not None]
    best = max(known) if known and is_accuracy(name) else min(known) if known and "loss" in name.lower() else None
    cells = ["–" if v is None else metric(name, v) if is_accuracy(name) else number(v) for v in values]
    return [
        f'<b class="best">{c}</b>' if v is not None and v == best else c for v, c in zip(values, cells, strict=True)
    ]
