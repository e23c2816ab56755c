"""The manifest of a dataset in files: which files, how many rows, what a sample is.

Here: `Manifest`. The driver makes it and sends it to every worker, so that all number the samples alike, also after a
resume. Not here: how each format is scanned (its own module).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.data.files.options import FileOptions
from syncline.data.named import DataInfo, Split

Kind = Literal["numbers", "list", "pixels", "images"]
"""How inputs are stored: one column per number, lists of numbers, raw bytes, or encoded images."""


@dataclass(frozen=True)
class FileFacts:
    """A file, and the number of rows in each of its groups."""

    path: str
    group_rows: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(self.group_rows)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of one dataset and what a sample of them is.

    Attributes:
        location: Absolute path or URL.
        test_location: Location of `test`, if different.
        format: Name of the file format.
        train: Training files.
        test: Test files; may be empty.
        held_out: Number of samples of `train` that are held out for testing.
        kind: How inputs are stored.
        features: Input columns; empty for formats without columns.
        label: Target column.
        input_shape: Shape of one input.
        classes: Number of classes; None for regression or without targets.
        class_names: Names of the classes, if labels are strings.
        is_bytes: Whether inputs are bytes, which `options.scale` converts to floats.
        size: Size of all files in bytes.
    """

    location: str
    test_location: str | None = None
    format: str
    options: FileOptions
    train: tuple[FileFacts, ...]
    test: tuple[FileFacts, ...]
    held_out: int = 0
    kind: Kind
    features: tuple[str, ...] = ()
    label: str | None = None
    input_shape: tuple[int, ...]
    classes: int | None
    class_names: tuple[str, ...] | None = None
    is_bytes: bool
    size: int

    def rows(self, split: Split) -> int:
        """The number of rows in the files of a split."""
        return sum(facts.rows for facts in (self.train if split == "train" else self.test))

    @property
    def shuffles_groups(self) -> bool:
        """Whether shuffling is limited to a few groups at a time."""
        if self.options.shuffle == "auto":
            # Twice, because compressed files grow when they are decoded.
            return self.format in ("parquet", "arrow") and 2 * self.size > self.options.cache_mb * 1e6
        return self.options.shuffle == "groups"

    def info(self, name: str) -> DataInfo:
        """The facts that a model and a plan need."""
        return DataInfo(
            name=name,
            train_samples=self.rows("train") - self.held_out,
            test_samples=self.rows("test") or self.held_out,
            input_shape=self.input_shape,
            classes=self.classes,
            scale=self.options.scale if self.is_bytes else None,
            class_names=self.class_names,
        )
