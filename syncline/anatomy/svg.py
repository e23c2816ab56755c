"""A network as a picture: a box for each layer from top to bottom, and arcs for connections that pass by others.

One SVG file that needs nothing else. It follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from syncline.anatomy.examine import Anatomy, Part
from syncline.anatomy.lanes import Bypass, bypasses
from syncline.anatomy.words import bytes_in_words, count_in_words, shape_in_words
from syncline.catalogue import activations

__all__ = ["as_svg"]

_BOX_WIDTH, _BOX_HEIGHT, _STEP = 360, 40, 64
_LEFT, _TOP, _LANE = 24, 76, 22
_FACTS_WIDTH = 330
_LONGEST_LABEL, _LONGEST_DETAIL = 30, 52

_STYLE = """
svg { --ink: #1c2733; --faint: #5b6875; --line: #8794a1; --paper: #ffffff; --plain: #eef1f4; --weights: #dcebfa;
  --active: #fdebd3; --join: #e4f3e0; --bypass: #2b7a3d; color-scheme: light dark;
  font-family: system-ui, sans-serif; background: var(--paper); }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #a3b0bd; --line: #6b7885; --paper: #11161c;
  --plain: #232b34; --weights: #16395c; --active: #4d3717; --join: #1f3f24; --bypass: #6cc682; } }
.paper { fill: var(--paper); } text { fill: var(--ink); font-size: 14px; } .title { font-size: 20px; font-weight: 600; }
.faint { fill: var(--faint); font-size: 12px; } .end { text-anchor: end; }
rect.box { stroke: var(--line); stroke-width: 1; rx: 7px; }
.plain { fill: var(--plain); } .weights { fill: var(--weights); } .active { fill: var(--active); }
.join { fill: var(--join); }
path { fill: none; stroke: var(--line); stroke-width: 1.5; } path.bypass { stroke: var(--bypass); stroke-width: 2; }
.head { fill: var(--line); } .head.of-bypass { fill: var(--bypass); }
"""


def as_svg(anatomy: Anatomy) -> str:
    """The picture, as the text of an SVG file."""
    parts = anatomy.parts
    found = bypasses([part.sources for part in parts])
    lanes = 1 + max((bypass.lane for bypass in found), default=-1)
    facts_at = _LEFT + _BOX_WIDTH + 24 + lanes * _LANE
    width, height = facts_at + _FACTS_WIDTH + _LEFT, _TOP + len(parts) * _STEP + 20
    total = (
        f"{anatomy.parameters:,} parameters, {count_in_words(anatomy.flops)} FLOPs and "
        f"{bytes_in_words(anatomy.activation_bytes)} of activations a sample"
    )
    body = [
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="34">{escape(anatomy.title)}</text>',
        f'<text class="faint" x="{_LEFT}" y="56">{escape(total)}</text>',
        *(_arrow(k) for k, part in enumerate(parts) if k and (not part.sources or k - 1 in part.sources)),
        *(_arc(bypass) for bypass in found),
        *(_box(part, k) for k, part in enumerate(parts)),
        *(_facts(part, k, facts_at) for k, part in enumerate(parts)),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(f"{anatomy.title}: {total}")}">'
    )
    return "\n".join([head, f"<title>{escape(anatomy.title)}</title>", f"<style>{_STYLE}</style>", *body, "</svg>\n"])


def _middle(number: int) -> int:
    return _TOP + number * _STEP + _BOX_HEIGHT // 2


def _arrow(number: int) -> str:
    """From the part before."""
    x, end = _LEFT + _BOX_WIDTH // 2, _middle(number) - _BOX_HEIGHT // 2
    start = _middle(number - 1) + _BOX_HEIGHT // 2
    head = f'<polygon class="head" points="{x - 5},{end - 8} {x + 5},{end - 8} {x},{end}"/>'
    return f'<path d="M {x} {start} V {end - 7}"/>{head}'


def _arc(bypass: Bypass) -> str:
    right, bend = _LEFT + _BOX_WIDTH, _LEFT + _BOX_WIDTH + 14 + bypass.lane * _LANE
    start, end = _middle(bypass.start) + 8, _middle(bypass.end) - 8
    head = f'<polygon class="head of-bypass" points="{right + 8},{end - 5} {right + 8},{end + 5} {right},{end}"/>'
    out, back = f"H {bend - 8} Q {bend} {start} {bend} {start + 8}", f"Q {bend} {end} {bend - 8} {end} H {right + 7}"
    return f'<path class="bypass" d="M {right} {start} {out} V {end - 8} {back}"/>{head}'


def _box(part: Part, number: int) -> str:
    y = _middle(number) - _BOX_HEIGHT // 2
    label = part.kind or "input"
    if part.kind and not part.name.isdigit():
        label = f"{part.name}: {part.kind}"
    return (
        f'<rect class="box {_colour(part)}" x="{_LEFT}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"/>'
        f'<text x="{_LEFT + 12}" y="{y + 25}">{escape(_shortened(label, _LONGEST_LABEL))}</text>'
        f'<text class="end" x="{_LEFT + _BOX_WIDTH - 12}" y="{y + 25}">{escape(shape_in_words(part.shape))}</text>'
    )


def _colour(part: Part) -> str:
    if len(part.sources) > 1:
        return "join"
    if part.parameters:
        return "weights"
    return "active" if part.kind in activations.table() else "plain"


def _facts(part: Part, number: int, x: int) -> str:
    """What is written beside the box."""
    y = _middle(number)
    counts: Sequence[str] = [
        f"{part.parameters:,} parameters" * bool(part.parameters),
        f"{count_in_words(part.flops)} FLOPs" * bool(part.flops),
        bytes_in_words(part.activation_bytes),
    ]
    return (
        f'<text class="faint" x="{x}" y="{y - 3}">{escape(", ".join(filter(None, counts)))}</text>'
        f'<text class="faint" x="{x}" y="{y + 14}">{escape(_shortened(part.detail, _LONGEST_DETAIL))}</text>'
    )


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
