"""The style sheet of the report and the live page, on top of `observe/page/base_style.py`.

The eight line colors remain distinct under the common kinds of color blindness (they keep the hues of Okabe and Ito's
palette), and each contrasts with the page in light and dark mode.
"""

from __future__ import annotations

from syncline.observe.page.base_style import BASE

_LIGHT = ("#0b62a8", "#b84a00", "#00745c", "#9b3f7d", "#7d6200", "#00718f", "#5b5f66", "#a3212b")
_DARK = ("#6db3f2", "#ff9d5c", "#4fd1a8", "#e59ccb", "#e8c15a", "#63d4ea", "#c0c5cc", "#ff8d98")


def _palette(colors: tuple[str, ...]) -> str:
    return " ".join(f"--c{i}: {color};" for i, color in enumerate(colors))


_COLORS = f"""
:root {{
  {_palette(_LIGHT)}
  --live: #0b62a8; --live-back: #dcebf9; --hover: #ffffff;
  --data: #7d6200; --forward: #3b86c8; --backward: #0b4a80; --exchange: #b84a00; --waiting: #aab4c0; --update: #00745c;
  --r1: #e3eefa; --r2: #c3daf3; --r3: #93bce8; --r4: #2f78bd; --r5: #0b4a80; --r-ink: #12283f; --r-ink-dark: #ffffff;
  --w1: #fdeee0; --w2: #fbd9b8; --w3: #f7bd85; --w4: #b84a00; --w5: #8a3200; --w-ink: #3f2108; --w-ink-dark: #ffffff;
}}
@media screen and (prefers-color-scheme: dark) {{
  :root {{
    {_palette(_DARK)}
    --live: #8cc4f7; --live-back: #14304a; --hover: #232b35;
    --data: #e8c15a; --forward: #6db3f2; --backward: #2f6fae; --exchange: #ff9d5c; --waiting: #566272;
    --update: #4fd1a8;
    --r1: #18293a; --r2: #1b3a58; --r3: #205079; --r4: #6db3f2; --r5: #a9d4fb; --r-ink: #dcebfa; --r-ink-dark: #0b1c2c;
    --w1: #33251a; --w2: #4a3019; --w3: #683e15; --w4: #ff9d5c; --w5: #ffc49a; --w-ink: #fbe5d3; --w-ink-dark: #2a1504;
  }}
}}
"""

_LINES = "\n".join(f".c{i} {{ --line: var(--c{i}); }}" for i in range(len(_LIGHT)))

_OWN = """
body { max-width: 74rem; }
h1 .badge { font-size: 0.95rem; vertical-align: 0.35rem; margin-left: 0.3rem; letter-spacing: 0; }
h3 { font-size: 1.05rem; margin: 1.25rem 0 0.5rem; }
small { font-size: 0.82em; color: var(--soft); }
.live { color: var(--live); background: var(--live-back); }
.failed { color: var(--failed); background: var(--failed-back); }
.nothing { color: var(--soft); }
.cause h2 { color: var(--failed); }
.best::after { content: " ★"; color: var(--good); font-weight: 400; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 0; }
.tiles div {
  background: var(--panel); border-radius: 8px; padding: 0.6rem 1rem 0.7rem; min-width: 8.5rem; flex: 0 1 auto;
}
.tiles dt { color: var(--soft); font-size: 0.85rem; }
.tiles dd {
  margin: 0; font-size: 1.45rem; font-weight: 600; letter-spacing: -0.01em; font-variant-numeric: tabular-nums;
}
.axis-choice { border: 0; padding: 0; margin: 0 0 0.75rem; display: flex; align-items: center; }
.axis-choice legend { float: left; padding: 0; margin-right: 0.6rem; color: var(--soft); font-size: 0.9rem; }
.axis-choice label { position: relative; }
.axis-choice input { position: absolute; inset: 0; opacity: 0; margin: 0; width: 100%; height: 100%; cursor: pointer; }
.axis-choice span {
  display: block; padding: 0.15rem 0.8rem; border: 1px solid var(--rule); font-size: 0.9rem; background: var(--page);
}
.axis-choice label:first-of-type span { border-radius: 6px 0 0 6px; }
.axis-choice label:last-of-type span { border-radius: 0 6px 6px 0; }
.axis-choice label + label span { border-left: 0; }
.axis-choice input:checked + span { background: var(--live-back); color: var(--live); font-weight: 600; }
.axis-choice input:focus-visible + span { outline: 2px solid var(--link); outline-offset: 1px; }
.by-epoch, .by-time { display: none; }
body:has(#axis-epoch:checked) .by-step, body:has(#axis-time:checked) .by-step { display: none; }
body:has(#axis-epoch:checked) .by-epoch, body:has(#axis-time:checked) .by-time { display: block; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.chart { margin: 0; padding: 0.8rem 0.9rem 0.6rem; min-width: 0; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; margin: 0 0 0.6rem; align-items: baseline; }
.chart figcaption b { color: var(--ink); font-size: 0.95rem; font-weight: 600; }
.keys { display: none; flex-wrap: wrap; gap: 0.1rem 0.9rem; }
.keys span { display: inline-flex; align-items: center; gap: 0.35rem; overflow-wrap: anywhere; }
.keys i, .ends i { flex: none; display: inline-block; width: 0.9rem; height: 0; border-top: 2.5px solid var(--line); }
.keys .faint i { border-top-width: 1.5px; opacity: 0.75; }
.plot {
  display: grid; grid-template-columns: 3rem minmax(0, 1fr) minmax(5rem, 10rem); grid-template-rows: 13rem 1.3rem auto;
  font-size: 0.78rem; color: var(--soft); font-variant-numeric: tabular-nums;
}
.charts > .chart:last-child:nth-child(odd) { grid-column: 1 / -1; }
.charts > .chart:last-child:nth-child(odd):not(:first-child) .plot { grid-template-rows: 10rem 1.3rem auto; }
.scale-note { position: absolute; right: 0.4rem; top: 0.1rem; }
.wide .plot { grid-template-rows: 15rem 1.3rem auto; }
.y, .x, .ends { position: relative; }
.y span { position: absolute; right: 0.45rem; transform: translateY(-50%); white-space: nowrap; }
.x { grid-column: 2; }
.x span { position: absolute; top: 0.25rem; transform: translateX(-50%); white-space: nowrap; }
.x-title { grid-column: 2; text-align: center; padding-top: 0.05rem; }
.area { position: relative; border-left: 1px solid var(--rule); }
.area svg { display: block; width: 100%; height: 100%; overflow: visible; }
.area path { fill: none; vector-effect: non-scaling-stroke; }
.area .grid { stroke: var(--rule); stroke-width: 1; }
.area .mark { stroke: var(--failed); stroke-width: 1.2; stroke-dasharray: 3 3; opacity: 0.8; }
.mark-number {
  position: absolute; top: -0.3rem; transform: translateX(-50%); background: var(--failed-back); color: var(--failed);
  font-size: 0.72rem; font-weight: 600; line-height: 1; padding: 0.15rem 0.3rem; border-radius: 4px;
}
.area .line { stroke: var(--line); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.area .faint { stroke-width: 1.3; opacity: 0.65; }
.area .points { stroke: var(--line); stroke-width: 6; stroke-linecap: round; }
.ends span {
  position: absolute; left: 0.3rem; right: 0; transform: translateY(-50%); white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; display: block; line-height: 1.2;
}
.ends i { width: 0.55rem; vertical-align: 0.25em; margin-right: 0.3rem; }
.ends b { color: var(--ink); font-weight: 600; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.tip {
  position: absolute; z-index: 2; top: 0.3rem; pointer-events: none; background: var(--hover); color: var(--ink);
  border: 1px solid var(--rule); border-radius: 6px; padding: 0.3rem 0.55rem; font-size: 0.8rem; line-height: 1.4;
  box-shadow: 0 2px 8px rgb(0 0 0 / 0.15); max-width: 16rem;
}
.tip div { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.tip i {
  display: inline-block; width: 0.7rem; border-top: 2.5px solid var(--line); vertical-align: 0.25em;
  margin-right: 0.35rem;
}
.stacks {
  display: grid; grid-template-columns: fit-content(12rem) minmax(0, 1fr) auto; gap: 0.45rem 0.8rem;
  align-items: center;
}
.stacks div { display: flex; height: 1.35rem; }
.stacks > span { overflow-wrap: anywhere; line-height: 1.2; }
.stacks b { font-variant-numeric: tabular-nums; font-weight: 600; }
.stacks .phase { border-right: 1px solid var(--panel); }
.stacks .phase:first-child { border-radius: 3px 0 0 3px; }
.stacks .phase:last-child { border-radius: 0 3px 3px 0; border-right: 0; }
.phase { background: var(--soft); }
.p-data { background: var(--data); } .p-forward, .p-compute { background: var(--forward); }
.p-backward { background: var(--backward); } .p-exchange { background: var(--exchange); }
.p-waiting {
  background: repeating-linear-gradient(135deg, var(--waiting) 0 3px, transparent 3px 6px), var(--panel);
  box-shadow: inset 0 0 0 1px var(--waiting);
}
.p-update { background: var(--update); }
.phase-keys { display: flex; flex-wrap: wrap; gap: 0.3rem 1.1rem; margin-top: 0.9rem; color: var(--ink); }
.phase-keys span { display: inline-flex; align-items: center; gap: 0.4rem; }
.phase-keys i { width: 0.85rem; height: 0.85rem; border-radius: 2px; flex: none; }
.numbers thead td { border-bottom: 1px solid var(--rule); }
.matrix { width: auto; border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; }
.matrix caption { text-align: left; color: var(--soft); font-size: 0.85rem; padding-bottom: 0.4rem; }
.matrix thead th, .matrix thead td { border: 0; text-align: center; padding: 0.1rem 0.3rem; font-size: 0.85rem; }
.matrix tbody tr + tr > * { border: 0; }
.matrix tbody th { vertical-align: middle; }
.matrix tbody th {
  text-align: right; padding: 0 0.5rem 0 0; font-size: 0.85rem; color: var(--soft); white-space: nowrap;
}
.matrix tbody td {
  width: 2.6rem; min-width: 1.7rem; height: 2.1rem; padding: 0; text-align: center; border-radius: 3px;
  vertical-align: middle;
}
.matrix .part { width: 4rem; color: var(--soft); font-size: 0.85rem; }
.matrix .s0 { background: var(--panel); color: var(--soft); }
.right { color: var(--r-ink); } .right.s4, .right.s5 { color: var(--r-ink-dark); }
.wrong { color: var(--w-ink); } .wrong.s4, .wrong.s5 { color: var(--w-ink-dark); }
.right.s1 { background: var(--r1); } .right.s2 { background: var(--r2); } .right.s3 { background: var(--r3); }
.right.s4 { background: var(--r4); } .right.s5 { background: var(--r5); }
.wrong.s1 { background: var(--w1); } .wrong.s2 { background: var(--w2); } .wrong.s3 { background: var(--w3); }
.wrong.s4 { background: var(--w4); } .wrong.s5 { background: var(--w5); }
.confusion { display: flex; flex-wrap: wrap; gap: 0.5rem 2.5rem; }
.confusion > div { flex: 1 1 20rem; min-width: 0; }
.confusion > div:first-child { flex: 0 1 auto; }
.confusion h3 { margin-top: 0; }
.examples { list-style: none; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: 0.75rem; }
.examples li {
  background: var(--panel); border-radius: 8px; padding: 0.55rem; width: 6.6rem; font-size: 0.85rem;
  text-align: center;
}
.examples img {
  image-rendering: pixelated; border-radius: 4px; display: block; margin: 0 auto 0.35rem; object-fit: contain;
  background: #000;
}
.examples small { display: block; }
.timeline .when { white-space: nowrap; color: var(--soft); font-variant-numeric: tabular-nums; }
.timeline td:last-child { width: 100%; overflow-wrap: anywhere; }
.kind { white-space: nowrap; font-size: 0.85rem; font-weight: 600; color: var(--soft); }
.k-failure, .k-end { color: var(--failed); }
.k-slow, .k-warning { color: var(--bad); }
.k-change, .k-start { color: var(--live); }
.run { display: inline-flex; align-items: center; gap: 0.5rem; overflow-wrap: anywhere; }
.run i { flex: none; width: 0.9rem; border-top: 3px solid var(--line); }
section > p { max-width: 60rem; }
section[id^="plan-"] p { margin-bottom: 0.2rem; }
@media (max-width: 40rem) {
  .plot { grid-template-columns: 2.6rem minmax(0, 1fr) 0.6rem; }
  .ends { display: none; }
  .keys { display: flex; }
  .tiles div { flex: 1 1 40%; min-width: 0; padding: 0.5rem 0.7rem; }
  .tiles dd { font-size: 1.2rem; }
  .stacks { grid-template-columns: minmax(0, 1fr) auto; gap: 0.15rem 0.8rem; }
  .stacks div { grid-column: 1 / -1; grid-row: auto; margin-bottom: 0.5rem; order: 0; }
  .stacks { grid-auto-flow: dense; }
  .matrix { border-spacing: 1px; }
  .matrix tbody td { width: 1.7rem; height: 1.6rem; font-size: 0.8rem; }
  .matrix .part { display: none; } .matrix thead th:last-child { display: none; }
  .timeline thead { display: none; }
  .timeline, .timeline tbody, .timeline tr { display: block; }
  .timeline tr { padding: 0.5rem 0; border-top: 1px solid var(--rule); }
  .timeline td { display: inline-block; padding: 0 0.6rem 0 0; border: 0 !important; }
  .timeline td:last-child { display: block; width: auto; }
  .numbers small { display: inline; }
}
@media print { .axis-choice, .tip, .cursor { display: none; } }
"""

STYLE = f"{BASE}{_COLORS}{_LINES}{_OWN}"
