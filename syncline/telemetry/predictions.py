"""What a classifier got right and wrong on the test data, as a run leaves it: `RUN/predictions.json`.

Here: the type and its file. Not here: who finds it out (`workers/predicting.py`) and who shows it (`report/`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.telemetry.run_dir import RunDir

__all__ = ["Example", "Pair", "Picture", "Predictions", "read_predictions", "write_predictions"]


class Picture(msgspec.Struct, frozen=True):
    """An input that can be looked at: rows of bytes, grey (1 channel) or red, green, blue (3 channels)."""

    width: int
    height: int
    channels: int
    pixels: bytes


class Example(msgspec.Struct, frozen=True):
    """A test sample that was classified wrongly."""

    index: int
    target: int
    predicted: int
    confidence: float
    """The probability that the model gave to its answer."""
    picture: Picture | None = None


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """How often this class was taken for that one."""

    target: int
    predicted: int
    count: int


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """All test samples by class and answer, and the wrong answers that the model was surest of."""

    epoch: int
    step: int
    classes: int
    pairs: list[Pair]
    examples: list[Example]
    class_names: list[str] | None = None

    def name_of(self, number: int) -> str:
        """A class, for people."""
        return self.class_names[number] if self.class_names and number < len(self.class_names) else str(number)


def write_predictions(run_dir: RunDir, found: Predictions) -> None:
    """Replace what the run knew before."""
    run_dir.write(run_dir.predictions, msgspec.json.encode(found))


def read_predictions(path: Path) -> Predictions | None:
    """What is in the file; None if there is none, or it is not what it should be."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Predictions)
    except (OSError, msgspec.DecodeError):
        return None
    return found if _makes_sense(found) else None


def _makes_sense(found: Predictions) -> bool:
    classes = range(found.classes)
    pictures = [e.picture for e in found.examples if e.picture is not None]
    return (
        all(p.target in classes and p.predicted in classes and p.count >= 0 for p in found.pairs)
        and all(e.target in classes and e.predicted in classes for e in found.examples)
        and all(p.channels in (1, 3) and len(p.pixels) == p.width * p.height * p.channels for p in pictures)
    )
