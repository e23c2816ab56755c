"""The page: `as_html`, a pure function from the records of runs to one file, and `content`, what is in it.

Here: the order of things. Not here: each thing (`overview.py`, `curves.py`, `phases.py`, `confusion.py`), looks
(`style.py`), what happens under the pointer (`script.py`). The live page (`watch/`) shows the same content.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from syncline import __version__
from syncline.page.document import document, text
from syncline.report import overview
from syncline.report.confusion import confusion
from syncline.report.curves import axes_for, curves, throughput
from syncline.report.phases import phases
from syncline.report.record import RunRecord
from syncline.report.script import SCRIPT
from syncline.report.style import STYLE

__all__ = ["as_html", "content", "heading", "title_of"]


def as_html(runs: Sequence[RunRecord]) -> str:
    """The whole page, for one run or several."""
    body = f"""<header>
{heading(runs)}
</header>
<main>
{content(runs)}
</main>
<footer>Made by Syncline {__version__} on {time.strftime("%Y-%m-%d, %H:%M UTC", time.gmtime())} from what the
{"run" if len(runs) == 1 else "runs"} left. Every number is in <code>events.jsonl</code>.</footer>"""
    return document(title=title_of(runs), body=body, style=STYLE, script=SCRIPT)


def title_of(runs: Sequence[RunRecord]) -> str:
    """What the page is called."""
    return f"{runs[0].name} · Syncline" if len(runs) == 1 else f"{len(runs)} runs · Syncline"


def heading(runs: Sequence[RunRecord]) -> str:
    """What is shown, and how it stands."""
    if len(runs) == 1:
        run = runs[0]
        title = run.state.plan.title if run.events else run.name
        return (
            f"<h1>{text(title)} {overview.badge(run)}</h1>"
            f'<p class="lead">{overview.subtitle(run)}<br><small>{text(run.name)}</small></p>'
            f"{overview.ending(run)}"
        )
    titles = sorted({run.state.plan.title for run in runs if run.events})
    what = ", ".join(titles) if titles else "nothing was written yet"
    return f'<h1>{len(runs)} runs side by side</h1><p class="lead">{text(what)}</p>'


def content(runs: Sequence[RunRecord]) -> str:
    """Everything below the heading, each part a section with a name of its own."""
    is_one = len(runs) == 1
    axes = axes_for(runs)
    has_curves = any(points for run in runs for points in run.curves.values())
    parts = [_section("figures", "", overview.figures(runs[0])) if is_one else ""]
    if not is_one:
        parts.append(_section("comparison", "Side by side", overview.comparison(runs)))
    shown = curves(runs, axes) if has_curves else '<p class="nothing">No numbers yet: no worker has taken a step.</p>'
    parts.append(_section("curves", "Curves", (_axis_choice([a.key for a in axes]) if has_curves else "") + shown))
    parts.append(_section("throughput", "Throughput", throughput(runs)))
    parts.append(_section("phases", "Where the time of a step goes", phases(runs)))
    for run in runs:
        if run.predictions is not None:
            name = "What is taken for what" + ("" if is_one else f": {run.name}")
            parts.append(_section(f"confusion-{run.name}", name, confusion(run.predictions)))
    if is_one:
        parts.append(_section("workers", "Workers", overview.workers(runs[0])))
    for run in runs:
        suffix = "" if is_one else f": {run.name}"
        parts.append(_section(f"happenings-{run.name}", f"What happened{suffix}", overview.happenings(run)))
    for run in runs:
        suffix = "" if is_one else f": {run.name}"
        told = f"{overview.plan(run)}<h3>The machine</h3>{overview.machine(run)}"
        parts.append(_section(f"plan-{run.name}", f"The plan{suffix}", told))
    return "\n".join(part for part in parts if part)


def _section(key: str, title: str, inside: str) -> str:
    if not inside:
        return ""
    head = f"<h2>{text(title)}</h2>" if title else ""
    return f'<section id="{text(key)}">{head}{inside}</section>'


def _axis_choice(keys: Sequence[str]) -> str:
    """Buttons that work without any script: the style looks at which one is on."""
    inputs = "".join(
        f'<label><input type="radio" name="axis" id="axis-{key}"{" checked" if i == 0 else ""}>'
        f"<span>{'steps' if key == 'step' else 'epochs' if key == 'epoch' else 'time'}</span></label>"
        for i, key in enumerate(keys)
    )
    return f'<fieldset class="axis-choice"><legend>Over</legend>{inputs}</fieldset>'
