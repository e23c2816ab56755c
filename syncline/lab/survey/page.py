"""`survey.html`: the survey as one page that opens offline. Pure: a file in, HTML out.

Here: the content. Not here: words (`text.py`), style and sorting (`page_style.py`), the document around it
(`observe/page/document.py`), bars (`bench/bars.py`).
"""

from __future__ import annotations

from syncline.lab.bench.bars import axis_for, draw_axis, draw_bar
from syncline.lab.statistics import Spread
from syncline.lab.survey.catalog import Column, Entry
from syncline.lab.survey.page_style import SCRIPT, STYLE
from syncline.lab.survey.survey_file import SurveyFile
from syncline.lab.survey.text import (
    NOT_MEASURED,
    Row,
    entries_of,
    machine_lines,
    name_of,
    number,
    printed_in,
    ranking_lines,
    rows_of,
    words_of,
)
from syncline.lab.survey.values import Absent, Check, Figure, Value
from syncline.observe.page.document import document, region, text


def as_html(survey: SurveyFile) -> str:
    entries = entries_of(survey)
    links = "".join(f'<li><a href="#{e.id}">{text(e.title)}</a>: {text(e.question)}</li>' for e in entries)
    machines = "".join(f"<p>{text(line)}</p>" for line in machine_lines(survey))
    sections = "\n".join(_section(survey, entry) for entry in entries)
    body = f"""<header>
<h1>Survey of frameworks</h1>
<p class="lead">What the published surveys of distributed deep learning asked, measured again on the machines
below.</p>
<p>Download the data: <a href="survey.json" download>survey.json</a>, <a href="survey.md" download>survey.md</a>. Check
it with <code>syncline survey verify survey.json</code>.</p>
</header>
<main>
<section><h2>Questions</h2><ul>{links}</ul></section>
<section><h2>Machines</h2>{machines}
<p>Frameworks take turns, round after round. A figure is the median of its rounds, with the quartiles in parentheses. A
framework is ahead of another one only if all rounds agree, on all machines, and the medians differ by 30% or more.</p>
</section>
{sections}
{_adapters(survey)}
</main>
<footer>Made by <code>syncline survey</code>.</footer>"""
    return document(title="Survey of frameworks", body=body, style=STYLE, script=SCRIPT)


def _section(survey: SurveyFile, entry: Entry) -> str:
    rows = rows_of(survey, entry)
    rankings = "".join(f"<li>{text(line)}</li>" for line in ranking_lines(survey, entry))
    figures = ""
    if entry.drawing == "bars":
        drawn = "".join(_figure(survey, entry, column, rows) for column in entry.columns)
        figures = f'<div class="multiples">{drawn}</div>'
    parts = [
        f'<section class="entry" id="{entry.id}">',
        f"<h2>{text(entry.title)}</h2>",
        f"<p><b>{text(entry.question)}</b></p>",
        f"<p>{text(entry.how)}</p>",
        figures,
        _table(survey, entry, rows),
        f'<ul class="rankings">{rankings}</ul>' if rankings else "",
        f'<p class="then">{text(printed_in(entry))}</p>',
        f'<p class="then">Measure it again: <code>syncline survey --only {entry.id}</code></p>',
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _figure(survey: SurveyFile, entry: Entry, column: Column, rows: list[Row]) -> str:
    """One of the small multiples: all of an entry share their axis, so that they can be compared."""
    values = [row.cells.get(c.key) for row in rows for c in entry.columns]
    axis = axis_for([_spread(value) for value in values if isinstance(value, Figure)])
    drawn = []
    for row in rows:
        value = row.cells.get(column.key)
        if isinstance(value, Figure):
            kind = "goal" if row.framework.startswith("syncline") else "other"
            drawn += [
                f'<span class="name">{text(name_of(survey, row))}</span>',
                f'<span class="value">{number(value.median)}</span>',
                draw_bar(axis, value.rounds, _spread(value), kind, column.unit),
            ]
    if not drawn:
        return ""
    better = f", {column.better} is better" if column.better else ""
    scale = ", logarithmic scale" if axis.is_logarithmic else ""
    caption = f"{text(column.title)}: {text(column.unit)}{better}{scale}"
    return (
        f'<figure><figcaption>{caption}</figcaption><div class="bars">{"".join(drawn)}'
        f"{draw_axis(axis, column.unit)}</div></figure>"
    )


def _spread(figure: Figure) -> Spread:
    return Spread(
        median=figure.median, low=figure.low, high=figure.high, least=min(figure.rounds), most=max(figure.rounds),
        count=len(figure.rounds),
    )  # fmt: skip


def _table(survey: SurveyFile, entry: Entry, rows: list[Row]) -> str:
    titles = ["framework", "version", *(f"{c.title}{f', {c.unit}' if c.unit else ''}" for c in entry.columns)]
    head = "".join(f'<th scope="col"><button type="button">{text(title)}</button></th>' for title in titles)
    body = []
    for row in rows:
        cells = "".join(
            _cell(title, row.cells.get(column.key, NOT_MEASURED))
            for title, column in zip(titles[2:], entry.columns, strict=True)
        )
        version = text(row.version) or "–"
        body.append(
            f'<tr><th scope="row">{text(name_of(survey, row))}</th><td data-label="version">{version}</td>{cells}</tr>'
        )
    table = f'<table class="numbers sortable"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return region(table, entry.title) + _reasons(survey, entry, rows)


def _cell(title: str, value: Value) -> str:
    """Its words, and for sorting a number: reasons go to the end."""
    match value:
        case Figure(median=median):
            sort, shown = f' data-sort="{median!r}"', text(words_of(value))
        case Check(holds=holds):
            badge = '<span class="badge met">✓ yes</span>' if holds else '<span class="badge missed">✗ no</span>'
            sort, shown = f' data-sort="{int(holds)}"', badge
        case Absent():
            sort, shown = "", '<span class="absent">not measured</span>'
        case _:
            sort, shown = "", text(words_of(value))
    return f'<td data-label="{text(title)}"{sort}>{shown}</td>'


def _reasons(survey: SurveyFile, entry: Entry, rows: list[Row]) -> str:
    """Evidence of checks and reasons for gaps, each once with the columns it applies to."""
    items = []
    for row in rows:
        found: dict[str, list[str]] = {}
        for column in entry.columns:
            value = row.cells.get(column.key, NOT_MEASURED)
            if isinstance(value, Check | Absent):
                found.setdefault(words_of(value), []).append(column.title)
        for words, columns in found.items():
            where = "" if len(columns) == len(entry.columns) else f", {', '.join(columns)}"
            items.append(f"<li><b>{text(name_of(survey, row) + where)}</b>: {text(words)}.</li>")
    return f'<ul class="reasons">{"".join(items)}</ul>' if items else ""


def _adapters(survey: SurveyFile) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(adapter.name)}</th>'
        f'<td data-label="what ran" class="words">{text(adapter.what)}</td>'
        f'<td data-label="adapter"><code>{text(adapter.digest[:12])}</code></td></tr>'
        for adapter in survey.adapters.values()
    )
    head = '<th scope="col">framework</th><th scope="col">what ran</th><th scope="col">adapter, SHA-256</th>'
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f"<section><h2>Adapters</h2>{region(table, 'Adapters')}</section>"
