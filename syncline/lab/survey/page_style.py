"""Style and script of `survey.html`, on top of the style of a bench page. The script sorts tables."""

from __future__ import annotations

from syncline.lab.bench.html_style import STYLE as BENCH

_OWN = """
body { max-width: 68rem; }
section.entry { border-top: 1px solid var(--rule); padding-top: 2rem; }
.multiples { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem; margin: 1rem 0; }
.multiples figure { margin: 0; }
.multiples figcaption { margin: 0 0 0.5rem; font-weight: 600; color: var(--ink); }
.multiples .bars { grid-template-columns: minmax(0, 1fr) auto; }
.multiples .bars .bar, .multiples .bars .axis { grid-column: 1 / -1; }
.multiples .bars .value { grid-column: 2; }
.sortable thead button {
  font: inherit; color: inherit; background: none; border: 0; padding: 0.2rem 0; cursor: pointer; text-align: inherit;
}
.sortable thead button:hover { color: var(--ink); text-decoration: underline; }
.sortable th[aria-sort="ascending"] button::after { content: " ▲"; }
.sortable th[aria-sort="descending"] button::after { content: " ▼"; }
.sortable thead th { white-space: normal; vertical-align: bottom; }
.numbers td.words { white-space: normal; text-align: left; }
.absent { color: var(--soft); font-style: italic; }
.reasons, .rankings { font-size: 0.92rem; padding-left: 1.2rem; overflow-wrap: anywhere; }
.then { color: var(--soft); font-size: 0.92rem; }
"""

STYLE = BENCH + _OWN

SCRIPT = r"""
"use strict";
document.querySelectorAll("table.sortable").forEach(table => {
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll("thead th")];
  const sort = (head, place) => {
    const falls = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const words = row => row.cells[place].textContent, value = row => row.cells[place].dataset.sort;
    const order = (a, b) => {
      if (place < 2) return words(a).localeCompare(words(b), undefined, {numeric: true}) * (falls ? -1 : 1);
      if (value(a) === undefined || value(b) === undefined)  // what was not measured stays at the end
        return (value(a) === undefined) - (value(b) === undefined);
      return (Number(value(a)) - Number(value(b))) * (falls ? -1 : 1);
    };
    [...body.rows].sort(order).forEach(row => body.append(row));
  };
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => sort(head, place)));
});
"""
