"""A classifier's predictions on the test data: `RUN/predictions.json`.

Here: the type and its file. Not here: computing them (`workers/predicting.py`) and showing them (`observe/report/`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.config.owned_files import open_regular
from syncline.telemetry.run_dir import RunDir


class Picture(msgspec.Struct, frozen=True):
    """An input as an image: rows of bytes, grayscale (1 channel) or RGB (3 channels)."""

    width: int
    height: int
    channels: int
    pixels: bytes


class Example(msgspec.Struct, frozen=True):
    """A misclassified test sample."""

    index: int
    target: int
    predicted: int
    confidence: float
    """The predicted probability of the predicted class."""
    picture: Picture | None = None


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """How often class `target` was predicted as `predicted`."""

    target: int
    predicted: int
    count: int


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of all test samples by true and predicted class, and the most confident mistakes."""

    epoch: int
    step: int
    classes: int
    pairs: list[Pair]
    examples: list[Example]
    class_names: list[str] | None = None

    def name_of(self, number: int) -> str:
        return self.class_names[number] if self.class_names and number < len(self.class_names) else str(number)


def write_predictions(run_dir: RunDir, found: Predictions) -> None:
    """Replace the run's earlier predictions."""
    run_dir.write(run_dir.predictions, msgspec.json.encode(found))


def read_predictions(path: Path) -> Predictions | None:
    """The file's content; None if it is missing or invalid."""
    try:
        with open_regular(path) as file:
            found = msgspec.json.decode(file.read(), type=Predictions)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if _is_consistent(found) else None


def _is_consistent(found: Predictions) -> bool:
    classes = range(found.classes)
    pictures = [e.picture for e in found.examples if e.picture is not None]
    return (
        all(p.target in classes and p.predicted in classes and p.count >= 0 for p in found.pairs)
        and all(e.target in classes and e.predicted in classes for e in found.examples)
        and all(p.channels in (1, 3) and len(p.pixels) == p.width * p.height * p.channels for p in pictures)
    )
