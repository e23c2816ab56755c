"""A network as an SVG image: a box for each layer from top to bottom, and arcs for skip connections.

One self-contained file. It follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from syncline.models.catalog import activations
from syncline.models.summary.skip_connections import SkipConnection, skip_connections
from syncline.models.summary.summarize import LayerSummary, ModelSummary
from syncline.models.summary.units import format_bytes, format_count, format_shape

_BOX_WIDTH, _BOX_HEIGHT, _STEP = 360, 40, 64
_LEFT, _TOP, _LANE = 24, 76, 22
_FACTS_WIDTH = 330
_LONGEST_LABEL, _LONGEST_DETAIL = 30, 52

_STYLE = """
svg { --ink: #1c2733; --faint: #5b6875; --line: #8794a1; --paper: #ffffff; --plain: #eef1f4; --weights: #dcebfa;
  --active: #fdebd3; --join: #e4f3e0; --skip: #2b7a3d; color-scheme: light dark;
  font-family: system-ui, sans-serif; background: var(--paper); }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #a3b0bd; --line: #6b7885; --paper: #11161c;
  --plain: #232b34; --weights: #16395c; --active: #4d3717; --join: #1f3f24; --skip: #6cc682; } }
.paper { fill: var(--paper); } text { fill: var(--ink); font-size: 14px; } .title { font-size: 20px; font-weight: 600; }
.faint { fill: var(--faint); font-size: 12px; } .end { text-anchor: end; }
rect.box { stroke: var(--line); stroke-width: 1; rx: 7px; }
.plain { fill: var(--plain); } .weights { fill: var(--weights); } .active { fill: var(--active); }
.join { fill: var(--join); }
path { fill: none; stroke: var(--line); stroke-width: 1.5; } path.skip { stroke: var(--skip); stroke-width: 2; }
.head { fill: var(--line); } .head.of-skip { fill: var(--skip); }
"""


def as_svg(summary: ModelSummary) -> str:
    """The image, as SVG text."""
    parts = summary.parts
    found = skip_connections([part.sources for part in parts])
    lanes = 1 + max((skip.lane for skip in found), default=-1)
    facts_at = _LEFT + _BOX_WIDTH + 24 + lanes * _LANE
    width, height = facts_at + _FACTS_WIDTH + _LEFT, _TOP + len(parts) * _STEP + 20
    total = (
        f"{summary.parameters:,} parameters, {format_count(summary.flops)} FLOPs and "
        f"{format_bytes(summary.activation_bytes)} of activations a sample"
    )
    body = [
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="34">{escape(summary.title)}</text>',
        f'<text class="faint" x="{_LEFT}" y="56">{escape(total)}</text>',
        *(_arrow(k) for k, part in enumerate(parts) if k and (not part.sources or k - 1 in part.sources)),
        *(_arc(skip) for skip in found),
        *(_box(part, k) for k, part in enumerate(parts)),
        *(_facts(part, k, facts_at) for k, part in enumerate(parts)),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(f"{summary.title}: {total}")}">'
    )
    return "\n".join([head, f"<title>{escape(summary.title)}</title>", f"<style>{_STYLE}</style>", *body, "</svg>\n"])


def _middle(number: int) -> int:
    return _TOP + number * _STEP + _BOX_HEIGHT // 2


def _arrow(number: int) -> str:
    x, end = _LEFT + _BOX_WIDTH // 2, _middle(number) - _BOX_HEIGHT // 2
    start = _middle(number - 1) + _BOX_HEIGHT // 2
    head = f'<polygon class="head" points="{x - 5},{end - 8} {x + 5},{end - 8} {x},{end}"/>'
    return f'<path d="M {x} {start} V {end - 7}"/>{head}'


def _arc(skip: SkipConnection) -> str:
    right, bend = _LEFT + _BOX_WIDTH, _LEFT + _BOX_WIDTH + 14 + skip.lane * _LANE
    start, end = _middle(skip.start) + 8, _middle(skip.end) - 8
    head = f'<polygon class="head of-skip" points="{right + 8},{end - 5} {right + 8},{end + 5} {right},{end}"/>'
    out, back = f"H {bend - 8} Q {bend} {start} {bend} {start + 8}", f"Q {bend} {end} {bend - 8} {end} H {right + 7}"
    return f'<path class="skip" d="M {right} {start} {out} V {end - 8} {back}"/>{head}'


def _box(part: LayerSummary, number: int) -> str:
    y = _middle(number) - _BOX_HEIGHT // 2
    return (
        f'<rect class="box {_color(part)}" x="{_LEFT}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"/>'
        f'<text x="{_LEFT + 12}" y="{y + 25}">{escape(_shortened(part.label, _LONGEST_LABEL))}</text>'
        f'<text class="end" x="{_LEFT + _BOX_WIDTH - 12}" y="{y + 25}">{escape(format_shape(part.shape))}</text>'
    )


def _color(part: LayerSummary) -> str:
    if len(part.sources) > 1:
        return "join"
    if part.parameters:
        return "weights"
    return "active" if part.kind in activations.table() else "plain"


def _facts(part: LayerSummary, number: int, x: int) -> str:
    """What is written beside the box."""
    y = _middle(number)
    counts: Sequence[str] = [
        f"{part.parameters:,} parameters" * bool(part.parameters),
        f"{format_count(part.flops)} FLOPs" * bool(part.flops),
        format_bytes(part.activation_bytes),
    ]
    return (
        f'<text class="faint" x="{x}" y="{y - 3}">{escape(", ".join(filter(None, counts)))}</text>'
        f'<text class="faint" x="{x}" y="{y + 14}">{escape(_shortened(part.detail, _LONGEST_DETAIL))}</text>'
    )


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
