"""What was found out about files before anybody reads samples of them.

Here: `Survey`, which the driver makes and every worker gets, so that all have the same samples under the same numbers,
also when a run is resumed. Not here: how each format is surveyed (its own module).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.data.files.options import FileOptions
from syncline.data.named import DataInfo, Split

__all__ = ["FileFacts", "Kind", "Survey"]

Kind = Literal["numbers", "list", "pixels", "pictures"]
"""How inputs are kept: a column for each number, lists of numbers, raw bytes, or encoded pictures."""


@dataclass(frozen=True)
class FileFacts:
    """A file and how many rows each of its groups has."""

    path: str
    group_rows: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(self.group_rows)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The files of one data set and what a sample of them is.

    Attributes:
        location: Where they are, absolute or a URL.
        test_location: Where `test` is, if elsewhere.
        format: What they are.
        train: The files to train on.
        test: The files to test on; empty if there are none.
        held_back: How many samples of `train` are for testing instead.
        kind: How inputs are kept.
        features: The columns that are inputs; empty where there are no columns.
        label: The column that is the target.
        input_shape: The shape of one input.
        classes: How many classes there are; None if the targets are numbers to be fitted, or there are none.
        class_names: What labels that are texts stand for.
        is_bytes: Whether the inputs are bytes, which `options.scale` turns into floats.
        size: Of all files, in bytes.
    """

    location: str
    test_location: str | None = None
    format: str
    options: FileOptions
    train: tuple[FileFacts, ...]
    test: tuple[FileFacts, ...]
    held_back: int = 0
    kind: Kind
    features: tuple[str, ...] = ()
    label: str | None = None
    input_shape: tuple[int, ...]
    classes: int | None
    class_names: tuple[str, ...] | None = None
    is_bytes: bool
    size: int

    def rows(self, split: Split) -> int:
        """How many rows the files of a split have."""
        return sum(facts.rows for facts in (self.train if split == "train" else self.test))

    @property
    def shuffles_groups(self) -> bool:
        """Whether only a few groups are mixed at a time."""
        if self.options.shuffle == "auto":
            # Twice: what is packed in the files takes more room once it is decoded.
            return self.format in ("parquet", "arrow") and 2 * self.size > self.options.cache_mb * 1e6
        return self.options.shuffle == "groups"

    def info(self, name: str) -> DataInfo:
        """What a model and a plan need to know."""
        return DataInfo(
            name=name,
            train_samples=self.rows("train") - self.held_back,
            test_samples=self.rows("test") or self.held_back,
            input_shape=self.input_shape,
            classes=self.classes,
            scale=self.options.scale if self.is_bytes else None,
            class_names=self.class_names,
        )
