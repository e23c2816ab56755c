"""The report's section on a divided graph: what the division cuts, what halos move, and how old they were.

Here: `division`, a pure function of a run's record. Not here: dividing (`graphs/partition.py`), and the histogram of
ages, which `syncline strategies --run` prints.
"""

from __future__ import annotations

from syncline.observe.division_text import division_text
from syncline.observe.formatting import size
from syncline.observe.page.document import region, text
from syncline.observe.report.record import RunRecord

_MOST_WORKERS = 64


def division(run: RunRecord) -> str:
    """The last division; nothing if no graph was divided."""
    if run.division is None:
        return ""
    lead = f"<p>{text(division_text(run.division).capitalize())}.</p>"
    workers = sorted((worker_id, found) for worker_id, found in run.workers.items() if found.steps)
    rows = "".join(
        f'<tr><th scope="row">worker {worker_id}</th>'
        f'<td data-label="halo">{size(round(found.bytes_inside / found.steps))} per step</td>'
        f'<td data-label="gradients">{size(round((found.bytes_sent - found.bytes_inside) / found.steps))} per step</td>'
        "</tr>"
        for worker_id, found in workers[:_MOST_WORKERS]
    )
    head = "".join(f'<th scope="col">{column}</th>' for column in ("halo", "gradients"))
    table = f'<table class="numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return lead + region(table, "Graph")
