"""Writing samples in each format, a batch at a time.

Here: one small class per format. Each writes one split of a dataset into a folder that Syncline can read again. Not
here: where the samples come from (`convert.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from syncline.data.files.datum import Datum, write_datum
from syncline.data.files.image_codec import encode
from syncline.data.files.table import CLASS_NAMES, SHAPE
from syncline.data.named import DataInfo, Split
from syncline.errors import DataError

_LMDB_ROOM = 1 << 40
"""The maximum size of an LMDB: address space, not disk."""


class Writer(Protocol):
    """Writes the samples of one split."""

    def write(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """A batch: uint8 or float32 inputs, and int64 class indices or float32 targets."""

    def close(self) -> None: ...


class _Columns:
    """Batches as Arrow record batches, with shape and class names in the schema's metadata."""

    def __init__(self, info: DataInfo) -> None:
        self._notes = {SHAPE: json.dumps(info.input_shape)}
        if info.class_names is not None:
            self._notes[CLASS_NAMES] = json.dumps(info.class_names)

    def __call__(self, inputs: np.ndarray, targets: np.ndarray) -> pa.RecordBatch:
        if _is_image(inputs):
            name, column = "image", pa.array([{"bytes": encode(pixels), "path": None} for pixels in inputs])
        else:
            flat = pa.array(np.ascontiguousarray(inputs).reshape(-1))
            name, column = "features", pa.FixedSizeListArray.from_arrays(flat, int(np.prod(inputs.shape[1:])))
        batch = pa.record_batch([column, pa.array(targets.reshape(-1))], names=[name, "label"])
        return batch.replace_schema_metadata(self._notes)


class _TableWriter:
    """Parquet or Arrow: one row group per batch."""

    def __init__(self, path: Path, info: DataInfo, make: Callable[[Path, pa.Schema], Any]) -> None:
        self._path, self._make = path, make
        self._columns = _Columns(info)
        self._writer: Any = None

    def write(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        batch = self._columns(inputs, targets)
        if self._writer is None:
            self._writer = self._make(self._path, batch.schema)
        self._writer.write_table(pa.Table.from_batches([batch]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _CsvWriter:
    """One column per value; classes by name."""

    def __init__(self, path: Path, info: DataInfo) -> None:
        self._path, self._names = path, info.class_names
        self._writer: Any = None

    def write(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        flat = inputs.reshape(len(inputs), -1)
        labels = targets.reshape(-1).tolist()
        names = self._names
        columns = {f"x{i}": pa.array(np.ascontiguousarray(flat[:, i])) for i in range(flat.shape[1])}
        table = pa.table({**columns, "label": [names[i] for i in labels] if names else labels})
        if self._writer is None:
            self._writer = pyarrow.csv.CSVWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _LmdbWriter:
    """Caffe's Datum under numbered keys."""

    def __init__(self, path: Path) -> None:
        try:
            import lmdb
        except ImportError as error:
            raise DataError("Writing LMDB needs a package: pip install 'syncline[lmdb]'") from error
        self._environment = lmdb.open(str(path), map_size=_LMDB_ROOM, lock=False, writemap=False)
        self._count = 0

    def write(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        shape = inputs.shape[1:] if inputs.ndim == 4 else (int(np.prod(inputs.shape[1:])), 1, 1)
        channels, height, width = shape
        with self._environment.begin(write=True) as transaction:
            for values, target in zip(inputs, targets.reshape(-1).tolist(), strict=True):
                is_bytes = values.dtype == np.uint8
                datum = Datum(
                    channels=channels,
                    height=height,
                    width=width,
                    data=values.tobytes() if is_bytes else b"",
                    floats=() if is_bytes else tuple(values.reshape(-1).tolist()),
                    label=target,
                )
                transaction.put(f"{self._count:08}".encode(), write_datum(datum))
                self._count += 1

    def close(self) -> None:
        self._environment.close()


class _ImageWriter:
    """One PNG per sample, in the folder of its class."""

    def __init__(self, path: Path, info: DataInfo) -> None:
        assert info.classes is not None
        width = len(str(info.classes - 1))
        names = info.class_names or [f"{i:0{width}}" for i in range(info.classes)]
        if list(names) != sorted(names):  # sorted folders must be in the order of the class indices
            names = [f"{i:0{width}}-{name}" for i, name in enumerate(names)]
        self._folders = [path / name.replace("/", "-") for name in names]
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._count = 0

    def write(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        for pixels, target in zip(inputs, targets.tolist(), strict=True):
            (self._folders[target] / f"{self._count:08}.png").write_bytes(encode(pixels))
            self._count += 1

    def close(self) -> None: ...


def _is_image(inputs: np.ndarray) -> bool:
    return inputs.dtype == np.uint8 and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def _lmdb(folder: Path, split: Split, info: DataInfo) -> Writer:
    if info.classes is None:
        raise DataError(
            "A Caffe Datum holds a class index, but this data has regression targets. Choose another format."
        )
    return _LmdbWriter(folder / split)


def _images(folder: Path, split: Split, info: DataInfo) -> Writer:
    if info.classes is None or info.scale is None or len(info.input_shape) != 3 or info.input_shape[0] not in (1, 3):
        raise DataError(
            f"Image folders need uint8 images (1 or 3, height, width) with classes, but this data has inputs of shape "
            f"{info.input_shape}{'' if info.scale else ' of floats'}. Choose another format."
        )
    return _ImageWriter(folder / split, info)


WRITERS: dict[str, Callable[[Path, Split, DataInfo], Writer]] = {
    "parquet": lambda folder, split, info: _TableWriter(folder / f"{split}.parquet", info, pq.ParquetWriter),
    "arrow": lambda folder, split, info: _TableWriter(folder / f"{split}.arrow", info, pa.ipc.new_file),
    "csv": lambda folder, split, info: _CsvWriter(folder / f"{split}.csv", info),
    "lmdb": _lmdb,
    "images": _images,
}
