"""The parts of a page that are words and numbers: how a run is, its figures, its workers, its plan, what happened.

Pure functions from records to HTML. Not here: charts (`curves.py`, `phases.py`), the order of all this (`page.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.page.document import region, text
from syncline.page.ticks import clock
from syncline.plan.plan import Plan
from syncline.report.curves import COLOURS, loudest_marks
from syncline.report.record import RunRecord, Status
from syncline.view.words import (
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

__all__ = ["badge", "comparison", "ending", "figures", "happenings", "machine", "plan", "subtitle", "workers"]

_BADGES: dict[Status, tuple[str, str]] = {
    "finished": ("met", "✓ finished"), "running": ("live", "● training"), "starting": ("unjudged", "starting"),
    "stopped": ("unjudged", "stopped, saved"), "failed": ("lost", "✗ failed"), "killed": ("lost", "✗ killed"),
    "crashed": ("lost", "✗ ended without a word"), "empty": ("unjudged", "no events yet"),
}  # fmt: skip
_WORKER_BADGES = {
    "training": ("live", "● training"), "finished": ("met", "✓ finished"), "lost": ("lost", "✗ lost"),
    "starting": ("unjudged", "○ starting"),
}  # fmt: skip
_KINDS = {
    "loss": "lost", "change": "change", "slow": "slow", "warning": "warning", "end": "end", "start": "start",
    "note": "note",
}  # fmt: skip
_MOST_WORKERS = 32
_MOST_HAPPENINGS = 60
_MOST_FIGURES = 4


def badge(run: RunRecord) -> str:
    """How the run is, in a word or two."""
    kind, words = _BADGES[run.status]
    return f'<span class="badge {kind}">{words}</span>'


def subtitle(run: RunRecord) -> str:
    """`2 workers · allreduce · step 120 of 120`."""
    state = run.state
    total = f" of {state.plan.total_steps:,}" if state.plan.total_steps and not state.plan.is_own_loop else ""
    parts = [*state.title[1:], f"step {state.step:,}{total}"] if run.events else ["nothing was written yet"]
    if run.status == "running" and state.left_s is not None:
        parts.append(f"{duration(state.left_s)} left")
    return " · ".join(text(part) for part in parts)


def figures(run: RunRecord) -> str:
    """The numbers one looks for first."""
    shown = [(name, metric(name, value)) for name, value in metrics_in_order(run.metrics)[:_MOST_FIGURES]]
    if run.samples_per_s > 0:
        shown.append(("samples a second", rate(run.samples_per_s)))
    if run.seconds > 0:
        shown.append(("time", duration(run.state.summary.seconds if run.state.summary else run.seconds)))
    memory = run.peak_memory_bytes
    if memory:
        shown.append(("peak memory of a worker", size(max(memory.values()))))
    if not shown:
        return ""
    return f'<dl class="tiles">{"".join(f"<div><dt>{text(n)}</dt><dd>{text(v)}</dd></div>" for n, v in shown)}</dl>'


def ending(run: RunRecord) -> str:
    """Why a run that did not reach its end is where it is, and how to go on."""
    status, ended = run.status, run.state.ended
    if status == "crashed":
        return (
            '<p class="note">The run ended without saying why: its driver was killed, or the machine went down. What '
            f"was saved is there: <code>syncline resume {text(run.state.run_dir or run.name)}</code></p>"
        )
    if ended is None or status in ("finished", "running", "starting"):
        return ""
    if status == "failed":
        lines = text("\n".join(cause_first(ended.message, run.state.failures)))
        return f'<div class="cause"><h2>Why it failed</h2><pre tabindex="0">{lines}</pre></div>'
    return f'<p class="note">{text(ended.message)}</p>'


def comparison(runs: Sequence[RunRecord]) -> str:
    """The final figures of several runs, and what differs between their plans, in one table."""
    names = [n for n, _ in metrics_in_order({name: 0.0 for run in runs for name in run.metrics})]
    columns: list[tuple[str, list[str]]] = [("state", [badge(run) for run in runs])]
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
        f'<tr><th scope="row"><span class="run c{i % COLOURS}"><i></i>{text(run.name)}</span></th>'
        + "".join(f'<td data-label="{text(name)}">{cells[i]}</td>' for name, cells in columns)
        + "</tr>"
        for i, run in enumerate(runs)
    )
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return region(table, "Final figures of the runs")


def workers(run: RunRecord) -> str:
    """Each worker with its state and rate."""
    known = sorted(run.state.workers.items())
    if not known:
        return '<p class="nothing">No worker is known yet.</p>'
    memory = run.peak_memory_bytes
    rows = []
    for rank, worker in known[:_MOST_WORKERS]:
        status = worker.status
        if status in ("training", "starting") and run.status not in ("running", "starting"):
            kind, words = "unjudged", "ended"
        else:
            kind, words = _WORKER_BADGES[status]
        cells = {
            "state": f'<span class="badge {kind}">{words}</span>', "step": f"{worker.step:,}",
            "samples/s": rate(worker.samples_per_s) if worker.samples_per_s > 0 else "–",
            **({"peak memory": size(memory[rank]) if rank in memory else "–"} if memory else {}),
        }  # fmt: skip
        shown = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells.items())
        rows.append(f'<tr><th scope="row">worker {rank}</th>{shown}</tr>')
    columns = ["state", "step", "samples/s", *(["peak memory"] if memory else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    more = f"<p>{len(known) - _MOST_WORKERS} more.</p>" if len(known) > _MOST_WORKERS else ""
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return region(table, "Workers") + more


def happenings(run: RunRecord) -> str:
    """What happened when; what is on the time axis has the same number here."""
    if not run.marks:
        return '<p class="nothing">Nothing but training.</p>'
    numbers = {id(mark): n for n, mark in loudest_marks(run)}
    rows = "".join(
        f'<tr><td class="when">{clock(m.time_s)}</td><td class="when">step {m.step:,}</td>'
        f'<td><span class="kind k-{m.kind}">{numbers.get(id(m), "")} {_KINDS[m.kind]}</span></td>'
        f"<td>{text(m.words)}</td></tr>"
        for m in run.marks[-_MOST_HAPPENINGS:]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("time", "step", "what", "in words"))
    left_out = len(run.marks) - _MOST_HAPPENINGS
    more = f"<p>{left_out:,} before these are in events.jsonl.</p>" if left_out > 0 else ""
    return f'{more}<table class="happenings"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def plan(run: RunRecord) -> str:
    """The plan as a person would tell it; its bare facts if another version has made it."""
    try:
        told = Plan.from_dict(run.plan).in_words()
    except (msgspec.ValidationError, TypeError, KeyError, IndexError):
        return _facts({k: str(v) for k, v in run.plan.items() if isinstance(v, (str, int, float)) and v != ""})
    sentences = "".join(f"<p>{text(line)}</p>" for line in told.splitlines())
    parameters = f"<p>The model has {run.parameters:,} parameters.</p>" if run.parameters else ""
    return sentences + parameters


def machine(run: RunRecord) -> str:
    """Where it ran, and what that took."""
    facts: dict[str, str] = {}
    told: dict[str, Any] = run.machine
    if told.get("host"):
        facts["host"] = str(told["host"])
    if told.get("cores"):
        facts["processor"] = f"{told.get('processor', '')}, {count(int(told['cores']), 'core')}".strip(", ")
    if told.get("memory_available_bytes"):
        facts["memory available"] = size(int(told["memory_available_bytes"]))
    if told.get("python"):
        facts["Python"] = str(told["python"])
    memory = peak_memory(run.peak_memory_bytes)
    if memory is not None:
        facts["peak memory"] = memory
    if run.state.checkpoint is not None:
        facts["last checkpoint"] = f"step {run.state.checkpoint.step:,}, {size(run.state.checkpoint.bytes)}"
    return _facts(facts) if facts else '<p class="nothing">Nothing is known of it yet.</p>'


def _facts(facts: dict[str, str]) -> str:
    listed = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{listed}</dl>'


def _differing(runs: Sequence[RunRecord]) -> list[str]:
    """The settings that are not the same for all runs."""
    keys = ("model", "data", "strategy", "workers", "batch", "epochs", "seed", "precision", "memory_format")
    return [key for key in keys if len({_setting(run, key) for run in runs}) > 1]


def _setting(run: RunRecord, key: str) -> str:
    value = run.plan.get(key, "–")
    return str(len(value)) if isinstance(value, (list, tuple)) else str(value)


def _best_marked(name: str, values: Sequence[float | None]) -> list[str]:
    """The best is bold, if it is clear which way is better."""
    known = [v for v in values if v is not None]
    best = max(known) if known and is_accuracy(name) else min(known) if known and "loss" in name.lower() else None
    cells = ["–" if v is None else metric(name, v) if is_accuracy(name) else number(v) for v in values]
    return [
        f'<b class="best">{c}</b>' if v is not None and v == best else c for v, c in zip(values, cells, strict=True)
    ]
