"""The style sheet of all pages: wide screens and phones, light and dark, print."""

from __future__ import annotations

BASE = """
:root {
  --page: #ffffff; --panel: #f6f8fa; --ink: #1b2430; --soft: #56616f; --rule: #d9dfe6; --link: #0b5cad;
  --good: #0b6b3a; --good-back: #ddf3e4; --bad: #8a4b00; --bad-back: #fdecd2; --open: #4b5563; --open-back: #e8ebef;
  --failed: #a3212b; --failed-back: #fdecec; --note: #6b4e00; --note-back: #fff6da;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --panel: #1a2028; --ink: #e4e9ef; --soft: #a3afbd; --rule: #313a45; --link: #7fb8f5;
    --good: #84dba6; --good-back: #143623; --bad: #f4bd70; --bad-back: #3d2a0f; --open: #c0c8d2; --open-back: #2a323c;
    --failed: #ff9c9c; --failed-back: #3a1b1e; --note: #f0d58a; --note-back: #332a12;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 3rem; max-width: 58rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
}
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 0.5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; letter-spacing: -0.01em; margin: 0 0 0.5rem; overflow-wrap: anywhere; }
p { margin: 0 0 0.75rem; max-width: 46rem; }
a { color: var(--link); text-decoration-thickness: 1px; text-underline-offset: 2px; }
section { margin-top: 2.25rem; }
.lead { font-size: 1.1rem; color: var(--soft); }
.note {
  background: var(--note-back); color: var(--note); border-radius: 6px; padding: 0.5rem 0.85rem; margin-bottom: 0.5rem;
  max-width: none;
}
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: 0.875em; }
code { background: var(--panel); border: 1px solid var(--rule); border-radius: 4px; padding: 0.1em 0.4em; }
pre {
  margin: 0 0 0.75rem; padding: 0.75rem 0.9rem; background: var(--failed-back); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.45; max-height: 24rem; overflow-y: auto;
}
table { border-collapse: collapse; width: 100%; font-size: 0.94rem; }
th, td { text-align: left; vertical-align: baseline; padding: 0.5rem 0.9rem 0.5rem 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-weight: 500; font-size: 0.85rem; border-bottom: 1px solid var(--rule); }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
tbody th { font-weight: 500; }
.range { white-space: nowrap; }
.badge {
  display: inline-block; border-radius: 999px; padding: 0.05rem 0.6rem; font-size: 0.85rem; font-weight: 600;
  white-space: nowrap;
}
.met { color: var(--good); background: var(--good-back); }
.missed { color: var(--bad); background: var(--bad-back); }
.unjudged { color: var(--open); background: var(--open-back); }
.scroll { overflow-x: auto; margin: 0 0 1rem; }
.numbers { font-variant-numeric: tabular-nums; }
.numbers th:not(:first-child), .numbers td { text-align: right; white-space: nowrap; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 0.75rem 1.5rem; margin: 0; }
.facts dt { color: var(--soft); font-size: 0.85rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.25rem 0 1.25rem; padding: 1rem 1.1rem 0.8rem; background: var(--panel); border-radius: 8px; }
figcaption { color: var(--soft); font-size: 0.85rem; margin-top: 0.35rem; }
.legend {
  display: flex; flex-wrap: wrap; gap: 0.35rem 1.25rem; font-size: 0.9rem; color: var(--soft); max-width: none;
}
.legend span { display: inline-flex; align-items: center; gap: 0.45rem; }
.key { display: inline-block; width: 1.3rem; height: 0.8rem; border-radius: 2px; background: var(--fill); }
footer {
  margin-top: 2.5rem; border-top: 1px solid var(--rule); padding-top: 1rem; color: var(--soft); font-size: 0.9rem;
}
@media (max-width: 40rem) {
  body { padding: 1.5rem 1rem 2rem; }
  h1 { font-size: 1.7rem; }
  .numbers thead { display: none; }
  .numbers, .numbers tbody, .numbers tr, .numbers tbody th { display: block; }
  .numbers tr { padding: 0.6rem 0; }
  .numbers tbody tr + tr { border-top: 1px solid var(--rule); }
  .numbers tbody tr + tr > * { border-top: 0; }
  .numbers tbody th, .numbers td { padding: 0.05rem 0; white-space: normal; }
  .numbers tbody th { font-weight: 600; }
  .numbers td { display: flex; justify-content: space-between; gap: 0.3rem; }
  .numbers td::before { content: attr(data-label); color: var(--soft); margin-right: auto; }
}
@media print {
  html { font-size: 10pt; }
  body { padding: 0; max-width: none; }
  figure, .badge, .note, .key, pre, rect, line, circle { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; }
  figure, tr, .note { break-inside: avoid; }
  pre { max-height: none; overflow: visible; }
  .scroll { overflow: visible; }
  a { color: inherit; text-decoration: none; }
}
"""
