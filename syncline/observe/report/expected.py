"""The report's section on the prediction of a run: what was expected of a step, and what came, term by term.

Here: `expected`, a pure function of a run's record. Not here: predicting and comparing (`planning/expected.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.observe.formatting import duration, size
from syncline.observe.page.document import region, text
from syncline.observe.report.record import RunRecord
from syncline.planning.expected import Row, error_text

_COLUMNS = ("predicted", "range", "came", "error")


def expected(run: RunRecord) -> str:
    """A table and a sentence; nothing for a run of a version that predicted none."""
    if run.expected is None:
        return ""
    lead = f"<p>{text(run.expected.source)}</p>"
    found = run.comparison
    if found is None:
        return lead
    rows = [*(_row(row, duration) for row in (*found.terms, found.step)), _row(found.bytes, lambda n: size(round(n)))]
    if found.memory is not None:
        rows.append(_row(found.memory, lambda n: size(round(n))))
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f"<p>{text(found.summary)}</p>{region(table, 'Prediction and fact')}{lead}"


def _row(row: Row, shown: Callable[[float], str]) -> str:
    predicted = row.predicted
    between = "" if predicted.low == predicted.high else f"{shown(predicted.low)} to {shown(predicted.high)}"
    cells = (shown(predicted.mid), between, shown(row.measured), error_text(row))
    data = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(_COLUMNS, cells, strict=True))
    return f'<tr><th scope="row">{text(row.name)}</th>{data}</tr>'
