"""The report of a bench as a page for readers who do not know the project: `bench.html`.

Here: `as_html`, a pure function from a report to a self-contained page: no network, no script, no other file. All text
of the report goes through `text`, because failures quote the output of programs. Not here: drawing bars (`bars.py`),
ratios in sentences (`comparisons.py`), colors and layout (`html_style.py`).
"""

from __future__ import annotations

import time

from syncline.lab.bench.bars import axis_for, draw_axis, draw_bar
from syncline.lab.bench.comparisons import better, describe_finding, describe_goal, factor, range_of
from syncline.lab.bench.harness import Contender, GoalVerdict, Suite, SuiteResult
from syncline.lab.bench.html_style import STYLE
from syncline.lab.bench.report import Report, caveats, describe_rounds, is_clear, number
from syncline.lab.machine import BenchMachine
from syncline.lab.statistics import Spread, spread
from syncline.observe.page.document import document, region, text

_SYNCLINE = (
    "Syncline trains PyTorch models on many workers with a choice of synchronization strategies, and continues when a "
    "worker fails."
)
_COLUMNS = ("", "median", "IQR", "all rounds", "ratio to baseline")
_VERDICTS = {True: ("met", "✓ met"), False: ("missed", "✗ not met"), None: ("unjudged", "? not judged")}
_NONE = "–"


def as_html(report: Report) -> str:
    sections = "\n".join(_suite(report, r, i) for i, r in enumerate(report.results))
    body = f"""<header>
<h1>Syncline bench</h1>
<p class="lead">{_SYNCLINE} This page shows its performance on one machine, side by side with the
alternatives.</p>
{_notes(report)}
</header>
<main>
{_summary(report)}
{_machine(report)}
{_how_to_read(report)}
{sections}
{_problems(report)}
</main>
<footer>All measurements are in <code>bench.json</code>, beside this page.</footer>"""
    return document(title=f"Syncline bench, {_when(report, '%Y-%m-%d')}", body=body, style=STYLE)


def _notes(report: Report) -> str:
    notes = caveats(report)
    if report.machine.is_busy:
        notes.append("Other processes were running: trust the ratios more than the times, and look at the spread.")
    if report.failures:
        notes.append("Some measurements failed; the errors are in their sections.")
    return "".join(f'<p class="note">{text(note)}</p>' for note in notes)


def _summary(report: Report) -> str:
    rows = [
        _verdict_row(result.suite, verdict, f"#suite-{i}")
        for i, result in enumerate(report.results)
        for verdict in result.verdicts()
    ]
    others = [
        f'<a href="#suite-{i}">{text(r.suite.name)}</a>' for i, r in enumerate(report.results) if not r.suite.goals
    ]
    parts = ["<section>", "<h2>Summary</h2>"]
    if rows:
        parts += [f"<p>{_score(report)}</p>", '<table class="summary">']
        parts += ["<thead><tr><th>goal</th><th>suite</th><th>measured</th><th>target</th></tr></thead>"]
        parts += ["<tbody>", *rows, "</tbody></table>"]
    if others:
        parts.append(f"<p>Measured without a goal: {', '.join(others)}.</p>")
    if not report.results:
        parts.append("<p>Nothing was measured.</p>")
    return "\n".join([*parts, "</section>"])


def _score(report: Report) -> str:
    """How many goals were met."""
    verdicts = [v.is_met for r in report.results for v in r.verdicts()]
    met, missed, unjudged = (verdicts.count(v) for v in (True, False, None))
    score = f"{met} of {len(verdicts)} goal{'s' * (len(verdicts) != 1)} met, {missed} not met"
    return f"{score}, {unjudged} not judged." if unjudged else f"{score}."


def _verdict_row(suite: Suite, verdict: GoalVerdict, link: str) -> str:
    doubt = ""
    if verdict.ratio is not None and not is_clear(verdict):
        doubt = ' <span class="doubt">The rounds disagree, so this is uncertain.</span>'
    found = f"<b>{text(verdict.goal.contender)}</b>: {_with_range(describe_finding(suite, verdict))}{doubt}"
    return (
        f'<tr><td class="verdict">{_badge(verdict)}</td><td class="suite"><a href="{link}">{text(suite.name)}</a></td>'
        f'<td class="found">{found}</td><td class="wanted">{text(describe_goal(suite, verdict.goal))}</td></tr>'
    )


def _badge(verdict: GoalVerdict) -> str:
    kind, label = _VERDICTS[verdict.is_met]
    return f'<span class="badge {kind}">{label}</span>'


def _machine(report: Report) -> str:
    machine = report.machine
    facts = {
        "processor": f"{machine.processor}, {machine.cores} core{'s' * (machine.cores != 1)}",
        "memory": f"{machine.memory_bytes / 1e9:.0f} GB",
        "system": machine.system,
        "software": f"Syncline {machine.syncline}, torch {machine.torch}, Python {machine.python}",
        "load at start": _load(machine),
        "measured": _when(report, "%Y-%m-%d, %H:%M UTC"),
        "kind": "quick: a first look with few rounds" if report.is_quick else "full",
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items())
    return f'<section>\n<h2>The machine</h2>\n<dl class="facts">{listed}</dl>\n</section>'


def _load(machine: BenchMachine) -> str:
    return f"{machine.load_at_start:.1f}, {'busy' if machine.is_busy else 'idle'}"


def _how_to_read(report: Report) -> str:
    if not report.results:
        return ""
    return (
        "<section>\n<h2>How to read this</h2>\n"
        "<p>The contenders of a suite ran in turn, round after round, after one warm-up round, so that a disturbance "
        "of the machine affects all of them. Ratios are computed within a round, then the median over the rounds is "
        "taken. Ranges are interquartile ranges (IQR).</p>\n"
        '<p class="legend"><span><i class="key baseline"></i>baseline</span>'
        '<span><i class="key goal"></i>has a goal</span><span><i class="key other"></i>for comparison</span>'
        '<span><i class="key line"></i>interquartile range</span>'
        '<span><i class="key round"></i>one round</span></p>\n</section>'
    )


def _suite(report: Report, result: SuiteResult, index: int) -> str:
    suite = result.suite
    parts = [
        f'<section class="suite" id="suite-{index}">',
        f"<h2>{text(suite.name)}</h2>",
        f"<p>{text(suite.measures)} {text(describe_rounds(result))}</p>",
        _contenders(suite),
        _chart(result),
        _table(result),
        *(f"<p>{_badge(v)} {_verdict(suite, v)}</p>" for v in result.verdicts()),
        _failures(result),
        _again(report, result),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _verdict(suite: Suite, verdict: GoalVerdict) -> str:
    goal = verdict.goal
    return (
        f"<b>{text(goal.contender)}</b>, target: {text(describe_goal(suite, goal))}; "
        f"measured: {_with_range(describe_finding(suite, verdict))}."
    )


def _with_range(sentence: str) -> str:
    """A range in parentheses at the end stays on one line."""
    before, opening, ends = text(sentence).rpartition("(")
    return f'{before}<span class="range">{opening}{ends}</span>' if opening else ends


def _chart(result: SuiteResult) -> str:
    suite = result.suite
    spreads = {c.name: result.spread(c.name) for c in suite.contenders}
    axis = axis_for([s for s in spreads.values() if s is not None])
    rows = []
    for contender in suite.contenders:
        found = spreads[contender.name]
        bar = draw_bar(axis, result.outcomes[contender.name].values, found, _kind(suite, contender), suite.unit)
        value = f"{number(found.median)} {suite.unit}" if found else "no value"
        rows += [
            f'<span class="name">{text(contender.name)}</span>',
            f'<span class="value">{text(value)}</span>',
            bar,
        ]
    direction = better(suite)
    caption = [text(suite.unit), *([f"{direction} is better"] if direction else [])]
    if axis.is_logarithmic:
        caption.append("<b>logarithmic scale</b>: equal distances are equal ratios")
    values = [v for outcome in result.outcomes.values() for v in outcome.values if v is not None]
    if not all(axis.holds(v) for v in values):
        caption.append("a ring at the edge is a round far outside the axis")
    return (
        f'<figure>\n<div class="bars">{"".join(rows)}{draw_axis(axis, suite.unit)}</div>\n'
        f"<figcaption>{', '.join(caption)}</figcaption>\n</figure>"
    )


def _kind(suite: Suite, contender: Contender) -> str:
    if contender.name == suite.baseline:
        return "baseline"
    return "goal" if any(g.contender == contender.name for g in suite.goals) else "other"


def _table(result: SuiteResult) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
    body = "\n".join(_row(result, c) for c in result.suite.contenders)
    table = f'<table class="numbers">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return region(table, f"Figures of {result.suite.name}")


def _row(result: SuiteResult, contender: Contender) -> str:
    found, ratio = result.spread(contender.name), spread(result.ratios(contender.name))
    failed = ' <span class="failed">failed</span>' if result.outcomes[contender.name].failures else ""
    cells = [_NONE] * 4
    if found is not None:
        between, all_rounds = (found.low, found.high), (found.least, found.most)
        cells[:3] = [
            f"{number(found.median)} {result.suite.unit}",
            range_of(*map(number, between)),
            range_of(*map(number, all_rounds)),
        ]
        cells[3] = "1" if contender.name == result.suite.baseline else _ratio(ratio)
    labeled = zip(_COLUMNS[1:], cells, strict=True)  # a phone shows a row as lines, each with its label
    numbers = "".join(f'<td data-label="{label}">{_with_range(cell)}</td>' for label, cell in labeled)
    return f'<tr><th scope="row">{text(contender.name)}{failed}</th>{numbers}</tr>'


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return _NONE
    return f"{factor(ratio.median)} ({range_of(factor(ratio.low), factor(ratio.high))})"


def _contenders(suite: Suite) -> str:
    described = [*((c.name, c.what) for c in suite.contenders if c.what), *suite.missing.items()]
    items = [f"<dt>{text(name)}</dt><dd>{text(what)}</dd>" for name, what in described]
    return f'<dl class="contenders">{"".join(items)}</dl>' if items else ""


def _failures(result: SuiteResult) -> str:
    items = []
    for name, outcome in result.outcomes.items():
        if outcome.failures:
            skipped = " twice and was skipped" if outcome.is_skipped else ""
            items.append(f"<p><b>{text(name)}</b> failed{skipped}.</p>\n<pre>{text(outcome.failures[-1])}</pre>")
    return f'<div class="failures">{"".join(items)}</div>' if items else ""


def _again(report: Report, result: SuiteResult) -> str:
    if result.entry is None:
        return ""
    repeats = max(1, round(result.rounds / result.suite.rounds_per_repeat))
    command = f"syncline bench {result.entry}{' --quick' * report.is_quick} --repeats {repeats}"
    return f'<p class="again">Reproduce with: <code>{text(command)}</code></p>'


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    errors = "".join(f"<pre>{text(problem)}</pre>" for problem in report.problems)
    return f'<section>\n<h2>Failures</h2>\n<div class="failures">{errors}</div>\n</section>'


def _when(report: Report, form: str) -> str:
    return time.strftime(form, time.gmtime(report.started))
