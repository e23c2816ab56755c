"""The clusters of a model that learns some, as pictures by layer: from `Centroids` to HTML.

Not here: making the pictures (`models/destin/pictures.py`).
"""

from __future__ import annotations

import base64

from syncline.observe.page.document import text
from syncline.observe.report.confusion import as_png
from syncline.telemetry.centroids import Centroids, LayerPictures

_MOST_PICTURES = 64


def centroids(found: Centroids) -> str:
    """A row of pictures for each layer."""
    return "".join(_layer(layer) for layer in found.layers)


def _layer(layer: LayerPictures) -> str:
    cards = []
    for number, picture in enumerate(layer.pictures[:_MOST_PICTURES], start=1):
        data = base64.b64encode(as_png(picture)).decode()
        alt = f"{text(layer.title)}, cluster {number}"
        cards.append(f'<img src="data:image/png;base64,{data}" alt="{alt}" width="48" height="48">')
    style = "display:flex;flex-wrap:wrap;gap:4px;image-rendering:pixelated"
    return f'<h3>{text(layer.title)}</h3><div style="{style}">{"".join(cards)}</div>'
