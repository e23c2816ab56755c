"""How the rows of files are cut into pieces, each scored as a whole.

Here: pure functions of the files' row counts. A piece is written as one file, so that it exists completely or not at
all; the pieces of a job never overlap and leave no row out. Not here: reading and writing (`piece_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

ROWS = 50_000
"""The most rows of a piece: little enough to repeat after a failure, and enough to make files of some megabytes."""


class ScoringPiece(msgspec.Struct, frozen=True, order=True):
    """The rows from `start` to before `stop` of one row group of one file."""

    file: int
    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The name of its output file: in order of the input."""
        return f"part-{self.file:05d}-{self.group:05d}-{self.start:010d}.parquet"


def pieces_of(files: Iterable[Sequence[int]], most_rows: int = ROWS) -> Iterator[ScoringPiece]:
    """The pieces of files, each given as the numbers of rows of its groups.

    >>> [p.rows for p in pieces_of([[5, 2], [3]], most_rows=3)]
    [3, 2, 2, 3]
    """
    for file, groups in enumerate(files):
        for group, rows in enumerate(groups):
            for start in range(0, rows, most_rows):
                yield ScoringPiece(file, group, start, min(start + most_rows, rows))
