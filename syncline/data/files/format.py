"""The interface of a file format.

Here: the protocols `Format` (for the driver: scan the files) and `Reader` (for a worker: read samples), and what all
formats share. Not here: the formats, one file each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from syncline.data.files.manifest import FileFacts, Manifest
from syncline.data.files.options import FileOptions
from syncline.data.files.store import Store
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Found:
    """The files of a dataset: paths in the store, and in the store of the test data."""

    store: Store
    train: tuple[str, ...]
    test_store: Store
    test: tuple[str, ...]

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        train = sum(self.store.size(path) for path in self.train)
        return train + sum(self.test_store.size(path) for path in self.test)

    @property
    def test_location(self) -> str | None:
        """Where the test files are, if elsewhere."""
        return None if self.test_store is self.store else self.test_store.location

    def manifest(
        self, options: FileOptions, train: tuple[FileFacts, ...], test: tuple[FileFacts, ...], **facts: Any
    ) -> Manifest:
        """The manifest of these files; `facts` are those that the format found."""
        rows, held_out = sum(file.rows for file in train), 0
        if options.test_share and not test:
            held_out = round(rows * options.test_share)
            if not 0 < held_out < rows:
                raise DataError(
                    f"{self.store.location} has {rows} samples; with test_share={options.test_share:g} that leaves "
                    f"{rows - held_out} to train on and {held_out} to test on. Both need at least one sample."
                )
        return Manifest(
            location=self.store.location, test_location=self.test_location, options=options, train=train, test=test,
            held_out=held_out, size=self.size, **facts,
        )  # fmt: skip


class Reader(Protocol):
    """Samples out of files of one format."""

    reads_whole_groups: bool
    """Whether reading one row costs as much as its whole group, so that decoded groups are worth caching."""

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Inputs and, if there are any, targets of these rows of a group; None means all."""


class Format(Protocol):
    """One kind of files."""

    name: str

    def scan(self, found: Found, options: FileOptions) -> Manifest:
        """The manifest, from reading as little as possible; DataError names the bad file."""

    def reader(self, manifest: Manifest, store: Store) -> Reader:
        """Reads samples from the files of one store."""


def refuse_empty(rows: int, location: str) -> None:
    """Raise a DataError if there are no rows."""
    if not rows:
        raise DataError(f"{location} has no rows.")
