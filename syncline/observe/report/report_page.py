"""The report: `as_html`, a pure function from the records of runs to one HTML file, and `content`, its body.

Here: the order of sections. Not here: each section (`overview.py`, `curves.py`, `phases.py`, ...), the style sheet
(`report_style.py`), tooltips (`script.py`). The live page (`observe/live/`) shows the same content.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from syncline import __version__
from syncline.observe.page.document import document, text
from syncline.observe.report import overview
from syncline.observe.report.centroids import centroids
from syncline.observe.report.confusion import confusion
from syncline.observe.report.curves import axes_for, curves, throughput
from syncline.observe.report.division import division
from syncline.observe.report.expected import expected
from syncline.observe.report.layout import layout
from syncline.observe.report.phases import phases
from syncline.observe.report.record import RunRecord
from syncline.observe.report.report_style import STYLE
from syncline.observe.report.script import SCRIPT


def as_html(runs: Sequence[RunRecord]) -> str:
    """The whole page, for one run or several."""
    made_at = time.strftime("%Y-%m-%d, %H:%M UTC", time.gmtime())
    body = f"""<header>
{heading(runs)}
</header>
<main>
{content(runs)}
</main>
<footer>Syncline {__version__}, {made_at}. All numbers are from <code>events.jsonl</code>.</footer>"""
    return document(title=title_of(runs), body=body, style=STYLE, script=SCRIPT)


def title_of(runs: Sequence[RunRecord]) -> str:
    return f"{runs[0].name} · Syncline" if len(runs) == 1 else f"{len(runs)} runs · Syncline"


def heading(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        run = runs[0]
        title = run.state.plan.title if run.events else run.name
        return (
            f"<h1>{text(title)} {overview.badge(run)}</h1>"
            f'<p class="lead">{overview.subtitle(run)}<br><small>{text(run.name)}</small></p>'
            f"{overview.ending(run)}"
        )
    titles = sorted({run.state.plan.title for run in runs if run.events})
    what = ", ".join(titles) if titles else "no events yet"
    return f'<h1>{len(runs)} runs compared</h1><p class="lead">{text(what)}</p>'


def content(runs: Sequence[RunRecord]) -> str:
    """All sections below the heading."""
    is_one = len(runs) == 1
    axes = axes_for(runs)
    has_curves = any(points for run in runs for points in run.curves.values())
    parts = [_section("figures", "", overview.figures(runs[0])) if is_one else ""]
    if not is_one:
        parts.append(_section("comparison", "Comparison", overview.comparison(runs)))
    shown = curves(runs, axes) if has_curves else '<p class="nothing">No data yet: no worker has completed a step.</p>'
    parts.append(_section("curves", "Curves", (_axis_choice([a.key for a in axes]) if has_curves else "") + shown))
    parts.append(_section("throughput", "Throughput", throughput(runs)))
    parts.append(_section("phases", "Time per step", phases(runs)))
    for run in runs:
        suffix = "" if is_one else f": {run.name}"
        parts.append(_section(f"expected-{run.name}", f"Prediction and fact{suffix}", expected(run)))
    for run in runs:
        if run.predictions is not None:
            name = "Confusion matrix" + ("" if is_one else f": {run.name}")
            parts.append(_section(f"confusion-{run.name}", name, confusion(run.predictions)))
        if run.centroids is not None:
            name = "Clusters" + ("" if is_one else f": {run.name}")
            parts.append(_section(f"clusters-{run.name}", name, centroids(run.centroids)))
    if is_one:
        parts.append(_section("layout", "Layout", layout(runs[0])))
        parts.append(_section("graph", "Graph", division(runs[0])))
        parts.append(_section("workers", "Workers", overview.workers(runs[0])))
    for run in runs:
        suffix = "" if is_one else f": {run.name}"
        parts.append(_section(f"timeline-{run.name}", f"Timeline{suffix}", overview.timeline(run)))
    for run in runs:
        suffix = "" if is_one else f": {run.name}"
        shown_plan = f"{overview.plan(run)}<h3>Machine</h3>{overview.machine(run)}"
        parts.append(_section(f"plan-{run.name}", f"Plan{suffix}", shown_plan))
    return "\n".join(part for part in parts if part)


def _section(key: str, title: str, inside: str) -> str:
    if not inside:
        return ""
    head = f"<h2>{text(title)}</h2>" if title else ""
    return f'<section id="{text(key)}">{head}{inside}</section>'


def _axis_choice(keys: Sequence[str]) -> str:
    """Radio buttons; the style sheet shows the selected axis, without a script."""
    inputs = "".join(
        f'<label><input type="radio" name="axis" id="axis-{key}"{" checked" if i == 0 else ""}>'
        f"<span>{'steps' if key == 'step' else 'epochs' if key == 'epoch' else 'time'}</span></label>"
        for i, key in enumerate(keys)
    )
    return f'<fieldset class="axis-choice"><legend>x-axis</legend>{inputs}</fieldset>'
