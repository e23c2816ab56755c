"""What the clusters of a model stand for, as pictures: `RUN/centroids.json`.

Here: the type and its file. Not here: making the pictures (`models/destin/pictures.py`) and showing them
(`observe/report/`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.config.owned_files import open_regular
from syncline.telemetry.predictions import Picture
from syncline.telemetry.run_dir import RunDir


class LayerPictures(msgspec.Struct, frozen=True):
    """The clusters of one node of a layer."""

    title: str
    pictures: list[Picture]


class Centroids(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per layer, the lowest first."""

    step: int
    layers: list[LayerPictures]


def write_centroids(run_dir: RunDir, found: Centroids) -> None:
    """Replace the run's earlier pictures."""
    run_dir.write(run_dir.centroids, msgspec.json.encode(found))


def read_centroids(path: Path) -> Centroids | None:
    """The file's content; None if it is missing or invalid."""
    try:
        with open_regular(path) as file:
            found = msgspec.json.decode(file.read(), type=Centroids)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    pictures = [picture for layer in found.layers for picture in layer.pictures]
    is_sound = all(p.channels in (1, 3) and len(p.pixels) == p.width * p.height * p.channels for p in pictures)
    return found if is_sound else None
