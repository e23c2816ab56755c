"""The confusion matrix of a classifier, and its most confident mistakes as images.

Pure functions from `Predictions` to HTML. Not here: computing them (`workers/predicting.py`).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from syncline.observe.formatting import accuracy, count
from syncline.observe.page.document import region, text
from syncline.telemetry.predictions import Example, Pair, Picture, Predictions

_LARGEST_MATRIX = 20
_MOST_PAIRS = 12
_LEVELS = 5
_PNG_COLOR_TYPES = {1: 0, 3: 2}  # by channels: gray, red-green-blue


class Shade(NamedTuple):
    """How dark a cell is, from 0 to 5, and whether it counts correct predictions."""

    level: int
    is_right: bool

    @property
    def css(self) -> str:
        return f"{'right' if self.is_right else 'wrong'} s{self.level}"


def confusion(found: Predictions) -> str:
    """The matrix (or, with many classes, the most confused pairs) and the examples."""
    samples = sum(pair.count for pair in found.pairs)
    right = sum(pair.count for pair in found.pairs if pair.target == pair.predicted)
    wrong = samples - right
    summary = (
        f"<p>{accuracy(right / samples if samples else None, 2)} of {samples:,} test samples correct after epoch "
        f"{found.epoch} (step {found.step:,}); {count(wrong, 'mistake')}.</p>"
    )
    matrix = _matrix(found) if found.classes <= _LARGEST_MATRIX else ""
    pairs = worst_pairs(found.pairs)
    first = matrix or (_pairs(found, pairs) if pairs else "")
    return f'{summary}<div class="confusion"><div>{first}</div><div>{_examples(found)}</div></div>'


def worst_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The most confused pairs of classes, the most frequent first."""
    wrong = [p for p in pairs if p.target != p.predicted and p.count]
    return sorted(wrong, key=lambda p: (-p.count, p.target, p.predicted))[:_MOST_PAIRS]


def shade(number: int, of_class: int, *, is_right: bool) -> Shade:
    """Correct predictions are darkest at 100% of a class, mistakes already at 10%."""
    part = number / of_class if of_class else 0.0
    if not number:
        return Shade(0, is_right)
    scaled = part if is_right else min(part / 0.1, 1.0)
    return Shade(max(1, min(round(scaled * _LEVELS), _LEVELS)), is_right)


def _matrix(found: Predictions) -> str:
    classes = range(found.classes)
    counts = {(p.target, p.predicted): p.count for p in found.pairs}
    totals = {c: sum(counts.get((c, d), 0) for d in classes) for c in classes}
    head = "".join(f'<th scope="col">{text(found.name_of(c))}</th>' for c in classes)
    rows = []
    for target in classes:
        cells = "".join(_cell(counts.get((target, answer), 0), totals[target], target == answer) for answer in classes)
        part = counts.get((target, target), 0) / totals[target] if totals[target] else None
        rows.append(
            f'<tr><th scope="row">{text(found.name_of(target))}</th>{cells}'
            f'<td class="part">{accuracy(part) if part is not None else "–"}</td></tr>'
        )
    table = (
        f'<table class="matrix"><caption>Rows: true class. Columns: predicted class.</caption>'
        f'<thead><tr><td></td>{head}<th scope="col">correct</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    return region(table, "Confusion matrix")


def _cell(number: int, of_class: int, is_right: bool) -> str:
    return f'<td class="{shade(number, of_class, is_right=is_right).css}">{number or ""}</td>'


def _pairs(found: Predictions, pairs: Sequence[Pair]) -> str:
    listed = "".join(
        f"<li>{text(found.name_of(p.target))} predicted as {text(found.name_of(p.predicted))}: {p.count:,}</li>"
        for p in pairs
    )
    return f"<p>Most confused pairs of {found.classes:,} classes:</p><ul>{listed}</ul>"


def _examples(found: Predictions) -> str:
    if not found.examples:
        return ""
    cards = "".join(_card(found, example) for example in found.examples)
    return f'<h3>Most confident mistakes</h3><ul class="examples">{cards}</ul>'


def _card(found: Predictions, example: Example) -> str:
    target, answer = text(found.name_of(example.target)), text(found.name_of(example.predicted))
    picture = ""
    if example.picture is not None:
        alt = f"test sample {example.index}, class {target}, predicted as {answer}"
        data = base64.b64encode(as_png(example.picture)).decode()
        picture = f'<img src="data:image/png;base64,{data}" alt="{alt}" width="72" height="72">'
    words = f"<b>{target} → {answer}</b> {accuracy(example.confidence, 0)}<small>sample {example.index:,}</small>"
    return f"<li>{picture}<span>{words}</span></li>"


def as_png(picture: Picture) -> bytes:
    """The picture encoded as PNG (ISO/IEC 15948)."""
    stride = picture.width * picture.channels
    rows = (picture.pixels[i : i + stride] for i in range(0, len(picture.pixels), stride))
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, _PNG_COLOR_TYPES[picture.channels], 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)  # filter type 0 (none) per row
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
