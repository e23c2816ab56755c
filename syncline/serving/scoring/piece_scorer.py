"""Scoring one piece: read its rows, run the model, write rows and predictions as one Parquet file.

Here: `PieceScorer`, which one process has. Not here: the processes (`processes.py`). Nothing here imports torch, unless
torch runs the model.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from syncline.data.files.columns import TableColumns, Where
from syncline.data.files.find import format_named
from syncline.data.files.store import Store
from syncline.data.files.table import TableFile, TableFormat
from syncline.errors import ConfigError
from syncline.serving.metadata import ModelMetadata
from syncline.serving.scoring.engine import Loaded, answer_of
from syncline.serving.scoring.job import ScoringJob
from syncline.serving.scoring.pieces import ScoringPiece
from syncline.serving.scoring.places import place_for
from syncline.serving.scoring.tables import columns_for, inputs_from, new_columns


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to score any piece of a job."""

    job: ScoringJob
    loaded: Loaded
    metadata: ModelMetadata
    out: str
    threads: int


class PieceScorer:
    """Scores pieces, and keeps the file and the row group of the last one."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._job = setup, setup.job
        self._answer = answer_of(setup.loaded, setup.threads)
        self._place = place_for(setup.out)
        self._store = Store(self._job.location)
        self._format = format_named(self._job.format)
        self._open: tuple[int, TableFile] | None = None
        self._group: tuple[int, int, pa.Table] | None = None

    def score(self, piece: ScoringPiece) -> None:
        """Write the file of a piece; it is there completely, or not at all."""
        file = self._file(piece.file)
        table = self._rows(file, piece)
        shown = file.where(piece.group)
        where = Where(shown.what, shown.row, shown.first + piece.start)
        columns = self._columns(file, shown.what)
        found = self._answer(inputs_from(table, columns, self._setup.metadata, where))
        for name, values in new_columns(found, self._setup.metadata, self._job.outputs).items():
            table = table.append_column(name, values)
        whole = pa.BufferOutputStream()
        pq.write_table(table, whole)
        self._place.write(piece.name, whole.getvalue().to_pybytes())

    def _columns(self, file: TableFile, shown: str) -> TableColumns:
        return columns_for(file.schema, self._setup.metadata, self._job.features, shown)

    def _file(self, number: int) -> TableFile:
        if self._open is None or self._open[0] != number:
            self.close()
            assert isinstance(self._format, TableFormat)
            facts = self._job.files[number]
            file = self._format.open(self._store, facts.path)
            self._open = (number, file)
            if file.group_rows != facts.group_rows:
                raise ConfigError(
                    f"{self._store.shown(facts.path)} has changed since the job began. Restore it, or start again with "
                    "another --out.",
                    code="scoring-input-changed", path=facts.path,
                )  # fmt: skip
        return self._open[1]

    def _rows(self, file: TableFile, piece: ScoringPiece) -> pa.Table:
        if self._group is None or self._group[:2] != (piece.file, piece.group):
            self._group = (piece.file, piece.group, file.read(piece.group, file.schema.names))
        return self._group[2].slice(piece.start, piece.rows)

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = self._group = None
