"""Spilling a DataFrame to files for the workers: executors write them, and no row passes through the driver.

Here: `spill`, which runs the executors, and `Fed`, its result. Not here: the files (`spilled.py`), and
what is in a column (`columns.py`).

The same rows give the same files, whatever their order and partitions: a hash of each row decides on its file and its
position there. So the same seed gives the same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from syncline.engines.spark import essence
from syncline.errors import DataError
from syncline.spark.columns import Kind, kind_of, read_features, read_labels
from syncline.spark.spilled import PartWriter, SpilledFile, SpilledFrame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["FrameColumns", "Fed", "spill"]

_ANSWER = (
    "path string, rows long, shape array<int>, bytes long, largest double, write_s double, read_s double, read long"
)
_PROBE_BATCHES, _PROBE_BATCH = 16, 128


@dataclass(frozen=True, kw_only=True)
class FrameColumns:
    """The columns to read, and how to read them."""

    features: str
    features_kind: Kind
    label: str
    label_kind: Kind
    are_classes: bool
    dtype: str = "float32"

    @classmethod
    def of(cls, frame: DataFrame, features: str, label: str, *, are_classes: bool | None, dtype: str) -> FrameColumns:
        """The columns of a DataFrame; an error if one is missing or unreadable.

        If `are_classes` is None, labels of integer types are classes.
        """
        from pyspark.sql.types import BooleanType, IntegralType

        types = {f.name: f.dataType for f in frame.schema.fields}
        for role, name in (("features", features), ("label", label)):
            if name not in types:
                raise DataError(
                    f"The DataFrame has no column {name!r} for the {role}. It has: {', '.join(types)}. Set "
                    f"{role}= to one of these."
                )
        if are_classes is None:
            are_classes = isinstance(types[label], IntegralType | BooleanType)
        return cls(
            features=features, features_kind=kind_of(features, types[features]),
            label=label, label_kind=kind_of(label, types[label]), are_classes=are_classes, dtype=dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class Fed:
    """A DataFrame on disk, with the throughput."""

    frame: SpilledFrame
    bytes: int
    classes: int
    """One more than the largest label."""
    write_rows_per_s: float
    """Over all executors, including Spark's computation of the DataFrame."""
    read_rows_per_s: float
    """Random batches by one worker."""

    def summary(self) -> str:
        return (
            f"feeding: {len(self.frame):,} rows in {len(self.frame.parts)} partitions ({self.bytes / 1e6:,.0f} MB) "
            f"written at {self.write_rows_per_s:,.0f} rows/s, read at {self.read_rows_per_s:,.0f} rows/s per worker"
        )


def spill(frame: DataFrame, columns: FrameColumns, parts: int, folder: Path) -> Fed:
    """Make the executors write `frame` to `parts` files of nearly equal size in `folder`."""
    from pyspark.sql import functions

    began = time.monotonic()
    names = [columns.features, columns.label]
    mark = functions.xxhash64(*names)
    dealt = frame.select(*names).repartition(parts, mark).sortWithinPartitions(mark)
    try:
        answers = dealt.mapInArrow(_Spiller(columns, str(folder)), _ANSWER).collect()
    except Exception as error:  # whatever Spark's Java side says
        raise DataError(f"The DataFrame could not be written for the workers: {essence(error)}") from error
    seconds = time.monotonic() - began
    if not answers:
        raise DataError("The DataFrame has no rows.")
    shapes = {tuple(a["shape"]) for a in answers}
    if len(shapes) > 1:
        raise DataError(f"The rows of {columns.features!r} differ in shape: {', '.join(map(str, sorted(shapes)))}.")
    answers.sort(key=lambda a: a["path"])
    found = SpilledFrame(tuple(SpilledFile(a["path"], a["rows"]) for a in answers), shapes.pop())
    return Fed(
        frame=found,
        bytes=sum(a["bytes"] for a in answers),
        classes=int(max(a["largest"] for a in answers)) + 1,
        write_rows_per_s=len(found) / seconds,
        read_rows_per_s=sum(a["read"] for a in answers) / max(sum(a["read_s"] for a in answers), 1e-9),
    )


class _Spiller:
    """Runs in the executors: writes all batches of a partition to one file."""

    def __init__(self, columns: FrameColumns, folder: str) -> None:
        self._columns, self._folder = columns, folder

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "this runs in an executor"
        columns, largest, began = self._columns, 0.0, time.monotonic()
        # Each attempt has a file of its own; who came to the end is in the answers.
        name = f"part-{context.partitionId():05d}-{context.taskAttemptId()}.arrow"
        writer = PartWriter(Path(self._folder, name))
        try:
            for batch in batches:
                if len(batch) == 0:
                    continue
                features = read_features(columns.features, batch.column(0), columns.features_kind, columns.dtype)
                labels = read_labels(
                    columns.label, batch.column(1), columns.label_kind, are_classes=columns.are_classes
                )
                largest = max(largest, float(labels.max(initial=0)))
                writer.write(features, labels)
            writer.close()
        except OSError as error:
            writer.abandon()
            raise DataError(
                f"An executor cannot write to {self._folder}: {error.strerror or error}. Set spill_dir= of "
                "the Estimator to a folder on a file system that all hosts share."
            ) from error
        except BaseException:
            writer.abandon()
            raise
        if writer.rows == 0:
            return
        written = time.monotonic()
        frame = SpilledFrame((SpilledFile(str(writer.path), writer.rows),), writer.feature_shape or ())
        read = _probe(frame)
        yield pa.RecordBatch.from_pydict(
            {
                "path": [str(writer.path)], "rows": [writer.rows],
                "shape": pa.array([list(writer.feature_shape or ())], pa.list_(pa.int32())),
                "bytes": [os.path.getsize(writer.path)], "largest": [largest],
                "write_s": [written - began], "read_s": [time.monotonic() - written], "read": [read],
            }
        )  # fmt: skip


def _probe(frame: SpilledFrame) -> int:
    """Read some random batches, as a worker will; returns the number of rows."""
    order = np.random.RandomState(0).randint(0, len(frame), (_PROBE_BATCHES, _PROBE_BATCH))
    for indices in order:
        frame.fetch(indices)
    return int(order.size)
