"""What a classifier takes for what: the confusion matrix, and the wrong answers it was surest of, as pictures.

Pure functions from `Predictions` to HTML. Not here: who finds it out (`workers/predicting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline.page.document import region, text
from syncline.report.png import data_url
from syncline.telemetry.predictions import Example, Pair, Predictions
from syncline.view.words import accuracy, count

__all__ = ["Shade", "confusion", "shade", "worst_pairs"]

_LARGEST_MATRIX = 20
_MOST_PAIRS = 12
_LEVELS = 5


class Shade(NamedTuple):
    """How dark a cell is, from 0 to 5, and whether it tells of right answers or wrong ones."""

    level: int
    is_right: bool

    @property
    def css(self) -> str:
        """Its classes."""
        return f"{'right' if self.is_right else 'wrong'} s{self.level}"


def confusion(found: Predictions) -> str:
    """The matrix, or the pairs that are confused most where it would be too large, and the examples."""
    samples = sum(pair.count for pair in found.pairs)
    right = sum(pair.count for pair in found.pairs if pair.target == pair.predicted)
    wrong = samples - right
    told = (
        f"<p>{accuracy(right / samples if samples else None, 2)} of {samples:,} test samples were right after epoch "
        f"{found.epoch} (step {found.step:,}); {count(wrong, 'answer')} {'was' if wrong == 1 else 'were'} wrong.</p>"
    )
    matrix = _matrix(found) if found.classes <= _LARGEST_MATRIX else ""
    pairs = worst_pairs(found.pairs)
    first = matrix or (_pairs(found, pairs) if pairs else "")
    return f'{told}<div class="confusion"><div>{first}</div><div>{_examples(found)}</div></div>'


def worst_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The classes that are taken for others most often, the most frequent first."""
    wrong = [p for p in pairs if p.target != p.predicted and p.count]
    return sorted(wrong, key=lambda p: (-p.count, p.target, p.predicted))[:_MOST_PAIRS]


def shade(number: int, of_class: int, *, is_right: bool) -> Shade:
    """Right answers are dark when nearly all of a class are; wrong ones when a tenth of a class already is."""
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
        f'<table class="matrix"><caption>Rows: what it is. Columns: what the model says.</caption>'
        f'<thead><tr><td></td>{head}<th scope="col">right</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    return region(table, "Confusion matrix")


def _cell(number: int, of_class: int, is_right: bool) -> str:
    return f'<td class="{shade(number, of_class, is_right=is_right).css}">{number or ""}</td>'


def _pairs(found: Predictions, pairs: Sequence[Pair]) -> str:
    listed = "".join(
        f"<li>{text(found.name_of(p.target))} taken for {text(found.name_of(p.predicted))}: {p.count:,}</li>"
        for p in pairs
    )
    return f"<p>Confused most, of {found.classes:,} classes:</p><ul>{listed}</ul>"


def _examples(found: Predictions) -> str:
    if not found.examples:
        return ""
    cards = "".join(_card(found, example) for example in found.examples)
    return f'<h3>Wrong, and sure of it</h3><ul class="examples">{cards}</ul>'


def _card(found: Predictions, example: Example) -> str:
    target, answer = text(found.name_of(example.target)), text(found.name_of(example.predicted))
    picture = ""
    if example.picture is not None:
        alt = f"test sample {example.index}, class {target}, taken for {answer}"
        picture = f'<img src="{data_url(example.picture)}" alt="{alt}" width="72" height="72">'
    words = f"<b>{target} → {answer}</b> {accuracy(example.confidence, 0)}<small>sample {example.index:,}</small>"
    return f"<li>{picture}<span>{words}</span></li>"
