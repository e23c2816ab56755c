"""The style sheet of `bench.html`, on top of the one of every page (`observe/page/base_style.py`)."""

from __future__ import annotations

from syncline.observe.page.base_style import BASE

_OWN = """
:root {
  --baseline: #c9d1da; --baseline-line: #3d4854; --goal: #8fd0c4; --goal-line: #0b4f47;
  --other: #b9cff0; --other-line: #1f3f77;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --baseline: #4a5563; --baseline-line: #d7dee6; --goal: #1f6e63; --goal-line: #b4f0e4;
    --other: #35558a; --other-line: #cfe0fb;
  }
}
section.suite { border-top: 1px solid var(--rule); padding-top: 2rem; }
.summary { margin-bottom: 0.75rem; }
.summary .verdict { white-space: nowrap; }
.summary .suite { white-space: nowrap; }
.summary .wanted { color: var(--soft); }
.doubt { color: var(--soft); font-style: italic; }
.failed { color: var(--failed); font-size: 0.85rem; font-weight: 600; }
.failures { color: var(--failed); }
.failures pre { color: var(--ink); }
.contenders {
  display: grid; grid-template-columns: fit-content(14rem) 1fr; gap: 0.25rem 1rem; margin: 0 0 1rem; font-size: 0.94rem;
}
.contenders dt { color: var(--soft); }
.contenders dd { margin: 0; }
.bars {
  display: grid; grid-template-columns: fit-content(15rem) minmax(0, 1fr) auto; column-gap: 0.9rem;
  grid-auto-flow: row dense; align-items: center;
}
.bars .name { grid-column: 1; line-height: 1.25; overflow-wrap: anywhere; }
.bars .value {
  grid-column: 3; text-align: right; font-variant-numeric: tabular-nums; font-weight: 600; white-space: nowrap;
}
.bars svg { display: block; overflow: visible; }
.bars .bar, .bars .axis { grid-column: 2; }
.axis text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.baseline { --fill: var(--baseline); --line: var(--baseline-line); }
.goal { --fill: var(--goal); --line: var(--goal-line); }
.other { --fill: var(--other); --line: var(--other-line); }
.bar .grid { stroke: var(--rule); stroke-width: 1; }
.bar .fill { fill: var(--fill); }
.bar .foot { stroke: var(--line); stroke-width: 1.5; }
.bar .stem { stroke: var(--fill); stroke-width: 4; }
.bar .whisker { stroke: var(--line); stroke-width: 1.5; }
.bar .median { stroke: var(--line); stroke-width: 2.5; }
.bar .dot { fill: var(--line); fill-opacity: 0.6; }
.many .dot { fill-opacity: 0.3; }
.bar .beyond { fill: none; stroke: var(--failed); stroke-width: 1.5; }
.key.line { background: none; height: 0.6rem; border: solid var(--soft); border-width: 0 2px; border-radius: 0;
  background: linear-gradient(var(--soft), var(--soft)) center / 100% 2px no-repeat; }
.key.round { width: 0.4rem; height: 0.4rem; border-radius: 50%; background: var(--soft); }
@media (max-width: 40rem) {
  .summary thead { display: none; }
  .summary, .summary tbody, .summary tr, .summary td { display: block; }
  .summary tr { padding: 0.7rem 0; }
  .summary tbody tr + tr { border-top: 1px solid var(--rule); }
  .summary tbody tr + tr > * { border-top: 0; }
  .summary td { padding: 0.1rem 0; }
  .summary .verdict, .summary .suite { display: inline-block; margin-right: 0.6rem; }
  .summary .wanted::before { content: "target: "; }
  .bars { grid-template-columns: minmax(0, 1fr) auto; }
  .bars .bar, .bars .axis { grid-column: 1 / -1; }
  .bars .value { grid-column: 2; }
  .bars .name, .bars .value { align-self: end; padding-top: 0.4rem; }
  .contenders { display: block; }
  .contenders dt { color: var(--ink); font-weight: 500; }
  .contenders dd { margin-bottom: 0.5rem; color: var(--soft); }
}
"""

STYLE = BASE + _OWN
