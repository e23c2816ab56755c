"""What a format must offer, so that the rest need not know which it is.

Here: the protocols `Format` (for the driver: what is in the files) and `Reader` (for a worker: the samples themselves),
and what all formats do alike in a survey. Not here: the formats, one file each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from syncline.data.files.options import FileOptions
from syncline.data.files.store import Store
from syncline.data.files.survey import FileFacts, Survey
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Format", "Found", "Reader", "held_back", "refuse_empty"]


@dataclass(frozen=True)
class Found:
    """The files of a data set, as they were found: paths of the store, and of the store of the test data."""

    store: Store
    train: tuple[str, ...]
    test_store: Store
    test: tuple[str, ...]

    @property
    def size(self) -> int:
        """Of all files, in bytes."""
        train = sum(self.store.size(path) for path in self.train)
        return train + sum(self.test_store.size(path) for path in self.test)

    @property
    def test_location(self) -> str | None:
        """Where the test files are, if elsewhere."""
        return None if self.test_store is self.store else self.test_store.location


class Reader(Protocol):
    """Samples out of files of one format."""

    reads_whole_groups: bool
    """Whether one row of a group costs as much as all of it, so that decoded groups are worth keeping."""

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Inputs and, if there are any, targets of these rows of a group; None means all."""


class Format(Protocol):
    """One kind of files."""

    name: str

    def survey(self, found: Found, options: FileOptions) -> Survey:
        """What is in the files, from as little of them as possible; DataError names the file that is wrong."""

    def reader(self, survey: Survey, store: Store) -> Reader:
        """Reads samples from the files of one store."""


def held_back(options: FileOptions, rows: int, test: Sequence[FileFacts], location: str) -> int:
    """How many of `rows` samples are held back for testing."""
    if test or not options.test_share:
        return 0
    number = round(rows * options.test_share)
    if not 0 < number < rows:
        raise DataError(
            f"{location} has {rows} samples; with test_share={options.test_share:g} that leaves {rows - number} to "
            f"train on and {number} to test on. Both need some."
        )
    return number


def refuse_empty(rows: int, location: str) -> None:
    """There must be something to train on."""
    if not rows:
        raise DataError(f"{location} has no rows: there is nothing to train on.")
