"""Whatever is wrong with a file, of any format: one clear error that names the file and the place in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sample_files
from sample_files import ROWS, datum, write, write_lmdb

from syncline.data.files.datum import write_datum
from syncline.data.files.find import scan
from syncline.data.files.options import FileOptions
from syncline.data.files.source import sources
from syncline.data.files.store import Store
from syncline.errors import DataError

Damage = Callable[[Path], Path]
"""Makes a sound file or folder wrong; the path that the error must name."""


def file_of(path: Path) -> Path:
    """The file that is corrupt: of a folder, the one in the middle."""
    if path.is_file():
        return path
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return files[len(files) // 2]


def empty(path: Path) -> Path:
    file_of(path).write_bytes(b"")
    return file_of(path)


def truncated(path: Path) -> Path:
    file = file_of(path)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])
    return file


def cut_in_a_line(path: Path) -> Path:
    """Before the last comma of a line: behind it nobody could tell."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b",", 0, len(data) * 2 // 3)])
    return path


def garbage(path: Path) -> Path:
    file_of(path).write_bytes(b"\x00\xffThis is no data at all.\x07" * 40)
    return file_of(path)


def overwritten(path: Path) -> Path:
    """Sound at both ends, with nonsense between."""
    file = file_of(path)
    data = bytearray(file.read_bytes())
    first = 8 if path.suffix == ".parquet" else len(data) // 3
    data[first : first + 120] = b"\xee" * 120
    file.write_bytes(data)
    return file


def bad_cell(path: Path) -> Path:
    lines = path.read_text().splitlines()
    lines[7] = lines[7].replace(lines[7].split(",")[1], "many", 1)
    path.write_text("\n".join(lines))
    return path


def missing_cell(path: Path) -> Path:
    lines = path.read_text().splitlines()
    lines[7] = lines[7].rpartition(",")[0]
    path.write_text("\n".join(lines))
    return path


def no_value(path: Path) -> Path:
    lines = path.read_text().splitlines()
    cells = lines[7].split(",")
    lines[7] = ",".join(["", *cells[1:]])
    path.write_text("\n".join(lines))
    return path


def of_texts(path: Path) -> Path:
    return _rewritten(path, "x1", pa.array([f"text {i}" for i in range(ROWS)]))


def null_in_group_2(path: Path) -> Path:
    return _rewritten(path, "x1", pa.array([None if i == 13 else 1.0 for i in range(ROWS)]))


def no_rows(path: Path) -> Path:
    return _write(path, sample_files.table(range(0)))


def _rewritten(path: Path, name: str, column: pa.Array) -> Path:
    table = sample_files.table()
    return _write(path, table.set_column(table.schema.names.index(name), name, column))


def _write(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=sample_files.GROUP)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=sample_files.GROUP)
    return path


def header_only(path: Path) -> Path:
    path.write_text("x0,x1,x2,x3,label\n")
    return path


def _records(path: Path, changes: dict[int, bytes]) -> Path:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    records = {f"{row:08}".encode(): write_datum(datum(row)) for row in range(ROWS)}
    records |= {f"{row:08}".encode(): record for row, record in changes.items()}
    write_lmdb(path, records)
    return path


def cut_record(path: Path) -> Path:
    return _records(path, {7: write_datum(datum(7))[:-6]})


def other_record(path: Path) -> Path:
    return _records(path, {7: b"no protobuf"})


def small_record(path: Path) -> Path:
    return _records(path, {7: write_datum(replace(datum(7), data=b"\x01" * 9, height=3, width=3))})


def no_records(path: Path) -> Path:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    return write_lmdb(path, {})


def other_size(path: Path) -> Path:
    from PIL import Image

    Image.new("L", (9, 4)).save(file_of(path))
    return file_of(path)


def no_images(path: Path) -> Path:
    for file in path.rglob("*.png"):
        file.unlink()
    return path


CASES: list[tuple[str, Damage, str]] = [
    ("csv", empty, "is empty.*header"),
    ("csv", cut_in_a_line, r"line \d+ is not valid CSV: Expected 5 columns, got 4"),
    ("csv", garbage, "no rows|not valid CSV|no column|not a number"),
    ("csv", bad_cell, r"line 8: the column 'x1' has 'many', which is not a number"),
    ("csv", missing_cell, r"line 8 is not valid CSV: Expected 5 columns, got 4"),
    ("csv", no_value, r"line 8: the column 'x0' is null"),
    ("csv", header_only, "has no rows"),
    ("parquet", empty, "is empty: 0 bytes instead of a Parquet file"),
    ("parquet", truncated, "is not a valid Parquet file"),
    ("parquet", garbage, "is not a valid Parquet file"),
    ("parquet", overwritten, r"row group 0"),
    ("parquet", of_texts, r"the column 'x1' of type string"),
    ("parquet", null_in_group_2, r"row group 2, row 3: the column 'x1' is null"),
    ("parquet", no_rows, "has no rows"),
    ("arrow", empty, "is empty: 0 bytes instead of an Arrow file"),
    ("arrow", truncated, "is not a valid Arrow file"),
    ("arrow", garbage, "is not a valid Arrow file"),
    ("arrow", overwritten, r"record batch \d+ is corrupt"),
    ("arrow", of_texts, r"the column 'x1' of type string"),
    ("arrow", null_in_group_2, r"record batch 2, row 3: the column 'x1' is null"),
    ("arrow", no_rows, "has no rows"),
    ("images", empty, "is empty: 0 bytes instead of an image"),
    ("images", truncated, "cannot be read as an image"),
    ("images", garbage, "cannot be read as an image"),
    ("images", overwritten, "cannot be read as an image"),
    ("images", other_size, r"has 9x4 pixels, .*4x4\b.*size=4"),
    ("images", no_images, "is an empty folder"),
    ("lmdb", empty, "is empty: 0 bytes instead of an LMDB database"),
    ("lmdb", truncated, "is truncated|is not a valid LMDB"),
    ("lmdb", garbage, "is not a valid LMDB database"),
    ("lmdb", cut_record, r"record 7 \(key '00000007'\) is not a valid Datum"),
    ("lmdb", other_record, r"record 7 \(key '00000007'\)"),
    ("lmdb", small_record, r"record 7 \(key '00000007'\) has 9 bytes, but 16 values are needed"),
    ("lmdb", no_records, "has no rows"),
]


def read_all(path: Path) -> None:
    train, _ = sources(scan(str(path), FileOptions()))
    for row in range(len(train)):
        train.fetch([row])


@pytest.mark.parametrize(
    ("name", "damage", "complaint"), CASES, ids=[f"{name}-{damage.__name__}" for name, damage, _ in CASES]
)
def test_a_file_that_is_wrong_is_named_with_the_place_in_it(tmp_path: Path, name: str, damage: Damage, complaint: str):
    path = write(name, tmp_path)
    wrong = damage(path)
    with pytest.raises(DataError, match=complaint) as caught:
        read_all(path)
    assert str(wrong) in str(caught.value)


def test_a_shard_among_many_is_named(tmp_path: Path):
    for number in range(4):
        pq.write_table(sample_files.table(), tmp_path / f"part-{number}.parquet", row_group_size=5)
    table = sample_files.table()
    pq.write_table(table.rename_columns(["x0", "x1", "x2", "other", "label"]), tmp_path / "part-2.parquet")
    with pytest.raises(DataError, match=r"part-2\.parquet has no column 'x3', but .*part-0\.parquet has"):
        scan(str(tmp_path), FileOptions())
    pq.write_table(table.set_column(3, "x3", pa.array(["a"] * ROWS)), tmp_path / "part-2.parquet")
    with pytest.raises(DataError, match=r"part-2\.parquet: the column 'x3' is of type string, but in .*double"):
        scan(str(tmp_path), FileOptions())


def test_a_file_that_changes_after_the_scan_is_reported(tmp_path: Path):
    path = write("parquet", tmp_path)
    train, _ = sources(scan(str(path), FileOptions()))
    pq.write_table(sample_files.table(range(ROWS - 1)), path)
    with pytest.raises(DataError, match=r"table\.parquet has changed: it has 23 rows in 1 groups, but had 24 in 5"):
        train.fetch([0])


@pytest.mark.parametrize(
    ("labels", "options", "complaint"),
    [
        (["a"] * ROWS, {"classes": 0}, "the column 'label' has 'a', which is not a number"),
        ([-1] * ROWS, {}, r"from -1 to -1.*classes=0"),
        ([0.5] * ROWS, {"classes": 3}, r"row group 0, row 0: the label is 0\.5, but the 3 classes"),
        ([7] * ROWS, {"classes": 3}, r"row group 0, row 0: the label is 7, but the 3 classes"),
    ],
)
def test_labels_that_do_not_fit_are_reported(tmp_path: Path, labels: list[object], options: dict, complaint: str):
    table = sample_files.table()
    pq.write_table(table.set_column(4, "label", pa.array(labels)), tmp_path / "table.parquet", row_group_size=5)
    with pytest.raises(DataError, match=complaint):
        sources(scan(str(tmp_path), FileOptions.of(options)))[0].fetch([0])


def test_a_folder_without_data_or_with_several_formats_is_reported(tmp_path: Path):
    with pytest.raises(DataError, match="is an empty folder"):
        scan(str(tmp_path), FileOptions())
    (tmp_path / "notes.txt").write_text("no data")
    with pytest.raises(DataError, match=r"1 files.*parquet.*format="):
        scan(str(tmp_path), FileOptions())
    write("csv", tmp_path)
    write("parquet", tmp_path)
    with pytest.raises(DataError, match=r"1 of parquet, 1 of csv.*format='parquet'"):
        scan(str(tmp_path), FileOptions())
    assert scan(str(tmp_path), FileOptions(format="csv")).format == "csv"
    with pytest.raises(DataError, match=r"nothing at .*gone\."):
        scan(str(tmp_path / "gone"), FileOptions())


@pytest.mark.parametrize("location", ["/", "//", "/usr/..", "file:///", "/proc", "linked"])
def test_a_whole_machine_is_not_searched_for_data(tmp_path, monkeypatch, location):
    (tmp_path / "linked").symlink_to("/")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.find", lambda *_: pytest.fail("it is searched"))
    with pytest.raises(DataError) as caught:
        Store(location).files()
    assert caught.value.code == "no-data-folder"
    assert caught.value.facts["location"] == Store(location).location
