"""The same small data in every format that can be read, for tests that hold for all of them."""

from __future__ import annotations

import io
import random
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
from PIL import Image

from syncline.data.files.datum import Datum, write_datum

ROWS = 24
GROUP = 5
CLASSES = 3


def image(row: int) -> np.ndarray:
    """A gray image of 4x4 pixels, of which each row has another."""
    return np.random.default_rng(row).integers(0, 256, (4, 4), dtype=np.uint8)


def label(row: int) -> int:
    return row % CLASSES


def numbers(row: int) -> list[float]:
    """Four numbers; the first is the row's own."""
    return [float(row), row / 7, -1.5 * row, 3.0]


def table(rows: range = range(ROWS)) -> pa.Table:
    columns = {f"x{i}": [numbers(row)[i] for row in rows] for i in range(4)}
    return pa.table({**columns, "label": [label(row) for row in rows]})


def png(row: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image(row)).save(file, "PNG")
    return file.getvalue()


def write_csv(path: Path) -> Path:
    pyarrow.csv.write_csv(table(), path)
    return path


def write_parquet(path: Path) -> Path:
    pq.write_table(table(), path, row_group_size=GROUP)
    return path


def write_arrow(path: Path) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=GROUP)
    return path


def write_images(path: Path) -> Path:
    for row in range(ROWS):
        folder = path / f"class-{label(row)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row:03}.png").write_bytes(png(row))
    return path


def write_lmdb(path: Path, records: dict[bytes, bytes] | None = None) -> Path:
    path.mkdir(parents=True)
    if records is None:
        records = {f"{row:08}".encode(): write_datum(datum(row)) for row in range(ROWS)}
    with lmdb.open(str(path), map_size=1 << 22) as environment, environment.begin(write=True) as transaction:
        for key in random.Random(0).sample(sorted(records), len(records)):  # LMDB keeps them sorted all the same
            transaction.put(key, records[key])
    (path / "lock.mdb").unlink()
    return path


def datum(row: int) -> Datum:
    return Datum(channels=1, height=4, width=4, data=image(row).tobytes(), label=label(row))


WRITERS = {
    "csv": ("table.csv", write_csv),
    "parquet": ("table.parquet", write_parquet),
    "arrow": ("table.arrow", write_arrow),
    "images": ("images", write_images),
    "lmdb": ("base", write_lmdb),
}


def write(name: str, folder: Path) -> Path:
    """The data in a format, in a file or folder below `folder`."""
    file, writer = WRITERS[name]
    return writer(folder / file)
