"""The rows of a DataFrame in Arrow files, as executors wrote them and workers read them.

Here: `PartWriter`, which writes one file, and `SpilledFrame`, the `Source` (`data/source.py`) of all of them. Neither
needs Spark. Not here: who writes which rows (`feeding.py`), and what is in a column (`columns.py`).

All rows of a file have the same size, so a worker maps the file into memory and finds samples by index without reading
the rest. Workers on one host share these pages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from syncline.config.owned_files import temporary_name
from syncline.data.source import Indices
from syncline.errors import DataError

__all__ = ["SpilledFile", "PartWriter", "SpilledFrame"]


@dataclass(frozen=True)
class SpilledFile:
    """One file."""

    path: str
    rows: int


class PartWriter:
    """Writes batches of features and labels to a file, which gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self.feature_shape: tuple[int, ...] | None = None
        self._temporary = temporary_name(path)
        self._file: pa.OSFile | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, features: np.ndarray, labels: np.ndarray) -> None:
        batch = pa.record_batch([_column(features), _column(labels)], names=["features", "label"])
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pa.OSFile(str(self._temporary), "wb")
            self._writer = pa.ipc.new_file(self._file, batch.schema)
            self.feature_shape = features.shape[1:]
        if features.shape[1:] != self.feature_shape:
            raise DataError(
                f"Some rows have features of shape {_shape(self.feature_shape)} and others of "
                f"{_shape(features.shape[1:])}. All rows must have the same shape."
            )
        self._writer.write_batch(batch)
        self.rows += len(batch)

    def close(self) -> None:
        """Complete the file. Without rows there is no file."""
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.close()
            os.replace(self._temporary, self.path)

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


@dataclass
class SpilledFrame:
    """Samples by index: the rows of all parts, in their order. Byte features are divided by 255."""

    parts: tuple[SpilledFile, ...]
    feature_shape: tuple[int, ...]
    label_shape: tuple[int, ...] | None = None
    """None: as they were written."""
    _pieces: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list, repr=False, compare=False)
    _ends: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pieces": [], "_ends": None}  # the receiver maps the files again

    def fetch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples at `indices`: one gather for each piece that has some."""
        if self._ends is None:
            self._open()
        assert self._ends is not None
        wanted = np.asarray(indices, np.int64)
        piece_of = np.searchsorted(self._ends, wanted, side="right")
        first_features, first_labels = self._pieces[0]
        features = np.empty((len(wanted), *first_features.shape[1:]), first_features.dtype)
        labels = np.empty((len(wanted), *first_labels.shape[1:]), first_labels.dtype)
        for piece in np.unique(piece_of):
            here = np.flatnonzero(piece_of == piece)
            rows = wanted[here] - (self._ends[piece - 1] if piece else 0)
            features[here], labels[here] = self._pieces[piece][0][rows], self._pieces[piece][1][rows]
        inputs = torch.from_numpy(features).reshape(len(wanted), *self.feature_shape)
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().div_(255.0)
        targets = torch.from_numpy(labels)
        return inputs, targets if self.label_shape is None else targets.reshape(len(wanted), *self.label_shape)

    def _open(self) -> None:
        pieces = []
        for part in self.parts:
            try:
                reader = pa.ipc.open_file(pa.memory_map(part.path))
            except (OSError, pa.ArrowInvalid) as error:
                raise DataError(
                    f"A worker cannot read {part.path}, where an executor wrote rows of the DataFrame ({error}). The "
                    "folder must be on a file system that all hosts share: set spill_dir= of the Estimator, or out=, "
                    "where the files are by default."
                ) from error
            for k in range(reader.num_record_batches):
                batch = reader.get_batch(k)
                pieces.append((_array(batch.column("features")), _array(batch.column("label"))))
        self._pieces = pieces
        self._ends = np.cumsum([len(labels) for _, labels in pieces])
        if int(self._ends[-1]) != len(self):
            raise DataError(f"The files of the DataFrame have {int(self._ends[-1])} rows instead of {len(self)}.")


def _column(rows: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return flat if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, int(np.prod(rows.shape[1:])))


def _array(column: pa.Array) -> np.ndarray:
    """A view of the file's memory."""
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=True))
    return np.asarray(column.flatten().to_numpy(zero_copy_only=True)).reshape(len(column), column.type.list_size)


def _shape(shape: tuple[int, ...] | None) -> str:
    return " x ".join(map(str, shape or (1,)))
