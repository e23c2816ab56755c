"""What every format gives: the same samples under the same numbers, split, labeled and shaped as asked for."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import sample_files
import torch
from sample_files import ROWS, image, label, numbers, write

from syncline.data.files.find import scan, split
from syncline.data.files.options import FileOptions
from syncline.data.files.source import FileSource, sources
from syncline.data.files.store import Store
from syncline.errors import ConfigError, DataError, UnknownName
from syncline.task import Task


def opened(path: Path, **options: object) -> tuple[FileSource, FileSource | None]:
    found = scan(str(path), FileOptions.of(options))
    return sources(pickle.loads(pickle.dumps(found)))  # as it travels to a worker


TABLES = ["csv", "parquet", "arrow"]
PICTURES = ["images", "lmdb"]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_gives_its_rows_in_order(tmp_path: Path, name: str):
    train, test = opened(write(name, tmp_path))
    assert (len(train), test) == (ROWS, None)
    inputs, targets = train.fetch([23, 0, 7])
    np.testing.assert_array_equal(inputs.numpy(), np.asarray([numbers(r) for r in (23, 0, 7)], np.float32))
    assert targets.tolist() == [label(r) for r in (23, 0, 7)]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("name", PICTURES)
def test_images_become_floats_from_minus_1_to_1(tmp_path: Path, name: str):
    train, _ = opened(write(name, tmp_path))
    rows = sorted(range(ROWS), key=lambda r: (label(r), r)) if name == "images" else list(range(ROWS))
    inputs, targets = train.fetch([5, 2])
    expected = np.stack([image(rows[5])[None], image(rows[2])[None]]).astype(np.float32)
    np.testing.assert_allclose(inputs.numpy(), (expected / 255 - 0.5) / 0.5, atol=1e-6)
    assert targets.tolist() == [label(rows[5]), label(rows[2])]


@pytest.mark.parametrize("name", [*TABLES, *PICTURES])
def test_a_share_held_back_for_testing_is_fixed_and_disjoint(tmp_path: Path, name: str):
    path = write(name, tmp_path)
    train, test = opened(path, test_share=0.25)
    assert test is not None
    assert (len(train), len(test)) == (18, 6)
    rows = [tuple(part.flatten().tolist()) for source in (train, test) for part in source.fetch(range(len(source)))[0]]
    assert len(set(rows)) == ROWS
    again, _ = opened(path, test_share=0.25)
    assert torch.equal(again.fetch(range(18))[0], train.fetch(range(18))[0])
    other, _ = opened(path, test_share=0.25, split_seed=1)
    assert not torch.equal(other.fetch(range(18))[0], train.fetch(range(18))[0])


@pytest.mark.parametrize("name", [*TABLES, *PICTURES])
def test_test_data_may_lie_elsewhere(tmp_path: Path, name: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train, test = opened(write(name, tmp_path / "a"), test=str(write(name, tmp_path / "b")))
    assert test is not None
    assert len(train) == len(test) == ROWS


@pytest.mark.parametrize("name", [*TABLES, *PICTURES])
def test_folders_called_train_and_test_are_what_they_say(tmp_path: Path, name: str):
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        if name == "images":
            sample_files.write_images(tmp_path / folder)
        else:
            write(name, tmp_path / folder)
    train, test = opened(tmp_path)
    assert test is not None
    assert len(train) == len(test) == ROWS
    train.fetch([0])
    test.fetch([0])


def test_only_files_that_all_say_what_they_are_for_are_split():
    def parts(*paths: str) -> tuple[list[str], list[str]]:
        return split(paths, paths)

    assert parts("train-0.parquet", "test-0.parquet") == (["train-0.parquet"], ["test-0.parquet"])
    assert parts("train/a", "validation/b") == (["train/a"], ["validation/b"])
    assert parts("train/a", "test/b", "validation/c") == (["train/a"], ["test/b"])
    assert parts("train/a", "test/b", "more/c") == (["train/a", "test/b", "more/c"], [])
    assert parts("mnist_train_lmdb/data.mdb", "mnist_test_lmdb/data.mdb")[1] == ["mnist_test_lmdb/data.mdb"]
    assert parts("trains/a", "planes/b") == (["trains/a", "planes/b"], [])


def test_text_labels_are_numbered_in_order_of_their_names(tmp_path: Path):
    (tmp_path / "t.csv").write_text("a,b,species\n1,2,setosa\n3,4,virginica\n5,6,setosa\n")
    found = scan(str(tmp_path / "t.csv"), FileOptions())
    assert (found.classes, found.class_names, found.features) == (2, ("setosa", "virginica"), ("a", "b"))
    assert sources(found)[0].fetch([0, 1, 2])[1].tolist() == [0, 1, 0]


def test_columns_are_chosen_by_name_and_numbers_may_be_fitted(tmp_path: Path):
    path = write("parquet", tmp_path)
    train, _ = opened(path, features=["x3", "x0"], label="x2", classes=0)
    inputs, targets = train.fetch([6])
    assert inputs.tolist() == [[3.0, 6.0]]
    assert (targets.tolist(), targets.dtype) == ([[-9.0]], torch.float32)
    with pytest.raises(DataError, match=r"'x33'.*'x3'"):
        opened(path, features="x33")
    (alone,) = opened(path, label="none", features="x1")[0].fetch([7])
    assert alone.tolist() == [[1.0]]


@pytest.mark.parametrize("kind", ["fixed", "list", "nested", "bytes", "binary", "struct", "png"])
def test_a_column_may_hold_a_whole_input(tmp_path: Path, kind: str):
    pixels = np.stack([image(r) for r in range(ROWS)])
    flat = pa.array(pixels.reshape(-1))
    columns = {
        "fixed": pa.FixedSizeListArray.from_arrays(flat.cast(pa.float32()), 16),
        "list": pa.array(pixels.reshape(ROWS, 16).astype(float).tolist()),
        "nested": pa.array(pixels.astype(np.int64).tolist()),
        "bytes": pa.FixedSizeListArray.from_arrays(flat, 16),
        "binary": pa.array([p.tobytes() for p in pixels]),
        "struct": pa.array([{"bytes": sample_files.png(r), "path": f"{r}.png"} for r in range(ROWS)]),
        "png": pa.array([sample_files.png(r) for r in range(ROWS)]),
    }
    table = pa.table({"image": columns[kind], "label": [label(r) for r in range(ROWS)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    options = {} if kind in ("struct", "png", "nested") else {"shape": (1, 4, 4)}
    inputs, _ = opened(tmp_path, **options)[0].fetch([20, 3])
    expected = pixels[[20, 3]].astype(np.float32).reshape(2, *(() if kind == "nested" else (1,)), 4, 4)
    if kind in ("bytes", "binary", "struct", "png"):
        expected = (expected / 255 - 0.5) / 0.5
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "note", ['{"info": {"features": {"label": {"names": ["cat", "dog", "eel"]}}}}', "no json", "{}"]
)
def test_names_of_classes_that_hugging_face_noted_are_used(tmp_path: Path, note: str):
    table = sample_files.table().replace_schema_metadata({"huggingface": note})
    pq.write_table(table, tmp_path / "t.parquet")
    found = scan(str(tmp_path), FileOptions())
    assert found.classes == 3
    assert found.class_names == (("cat", "dog", "eel") if "cat" in note else None)


def test_feather_and_arrow_streams_are_read_too(tmp_path: Path):
    pyarrow.feather.write_feather(sample_files.table(), str(tmp_path / "t.feather"), compression="lz4")
    assert len(opened(tmp_path / "t.feather")[0]) == ROWS
    table = sample_files.table()
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=5)
    assert opened(tmp_path / "s.arrow")[0].fetch([9])[0].tolist() == [pytest.approx(numbers(9))]


def test_images_of_any_size_are_brought_to_one(tmp_path: Path):
    from PIL import Image

    for name, size in (("a", (9, 5)), ("b", (3, 3))):
        (tmp_path / name).mkdir()
        Image.new("RGB", size, (255, 0, 0)).save(tmp_path / name / "1.jpg", quality=95)
    inputs, targets = opened(tmp_path, size=(4, 6), scale=(0.0, 1.0))[0].fetch([0, 1])
    assert inputs.shape == (2, 3, 4, 6)
    assert inputs[:, 0].min() > 0.9
    assert targets.tolist() == [0, 1]
    assert opened(tmp_path, size=4, channels=1)[0].fetch([0])[0].shape == (1, 1, 4, 4)


def test_only_the_row_groups_that_are_needed_are_read_and_a_few_are_kept(tmp_path: Path):
    path = write("parquet", tmp_path)
    train, _ = opened(path)
    train.fetch([0, 4, 1])
    assert train.groups_read == 1
    train.fetch([2, 23])
    assert train.groups_read == 2
    small, _ = opened(path, cache_mb=1e-6, shuffle="global")
    for row in (0, 23, 0, 23):
        small.fetch([row])
    assert small.groups_read == 4


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_a_survey_reads_little_of_a_file_and_a_worker_only_the_columns_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    rows = 4000
    table = pa.table(
        {f"x{i}": np.random.default_rng(i).random(rows) for i in range(9)} | {"label": [0, 1] * (rows // 2)}
    )
    path = tmp_path / f"t.{name}"
    if name == "parquet":
        pq.write_table(table, path, row_group_size=1000)
    else:
        pyarrow.feather.write_feather(table, str(path), chunksize=1000, compression="uncompressed")
    read = 0

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal read
            data = super().read(size) or b""
            read += len(data)
            return data

    monkeypatch.setattr(Store, "open", lambda self, path: Counting(path))
    found = scan(str(path), FileOptions(features="x3"))
    assert found.classes == 2
    assert read < path.stat().st_size / 4, "footers and labels"
    before = read
    sources(found)[0].fetch([0])
    assert read - before < path.stat().st_size / 4, "one group of two columns"


def test_in_groups_an_epoch_reads_each_row_group_once(tmp_path: Path):
    from syncline.data.order import Position, SampleOrder

    train, _ = opened(write("parquet", tmp_path), shuffle="groups", window=2, cache_mb=1e-6)
    order = SampleOrder(seed=0, count=ROWS, batch=3, groups=train.group_sizes, window=train.window)
    seen = []
    for share in order.shares(Position(), rank=0, size=1, epochs=1):
        seen += train.fetch(share.indices)[0][:, 0].tolist()
    assert sorted(seen) == list(range(ROWS))
    assert seen != sorted(seen)
    assert train.groups_read == 5


def test_large_data_is_shuffled_in_groups_and_small_data_globally(tmp_path: Path):
    path = write("parquet", tmp_path)
    assert opened(path)[0].group_sizes is None
    large, _ = opened(path, cache_mb=1e-6)
    assert large.group_sizes is not None
    assert large.group_sizes.tolist() == [5, 5, 5, 5, 4]
    assert opened(path, cache_mb=1e-6, shuffle="global")[0].group_sizes is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lable": "x"}, r"'lable'.*'label'"),
        ({"test_share": 1.0}, "test_share is 1.0"),
        ({"test": "x", "test_share": 0.1}, "test and test_share"),
        ({"channels": 2}, "channels is 2"),
        ({"shuffle": "some"}, "shuffle is 'some'"),
        ({"format": "xml"}, "format is 'xml'"),
        ({"size": "big"}, "size is 'big'"),
        ({"shape": 3}, "shape is 3"),
        ({"window": 0}, "window is 0"),
        ({"cache_mb": 0}, "cache_mb is 0"),
    ],
)
def test_an_option_that_cannot_be_is_reported_before_anything_is_read(options: dict[str, object], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        Task(model="mlp", data={"name": "some/where.csv", **options})


def test_a_task_knows_the_data_of_a_path_before_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write("csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    task = Task(model="mlp", data="table.csv(test_share=0.25)").with_defaults().located(None, None)
    assert task.data.path == str(tmp_path / "table.csv")
    facts = task.facts()
    assert (facts.data, facts.train_samples, facts.test_samples) == ("table.csv", 18, 6)
    elsewhere = Task(model="mlp", data=tmp_path / "table.csv", test="table.csv").with_defaults().located(None, None)
    assert elsewhere.facts().test_samples == ROWS
    assert elsewhere.facts().fingerprint != facts.fingerprint


def test_what_is_neither_a_name_nor_a_path_is_reported_with_the_nearest_name():
    with pytest.raises(UnknownName, match="path or URL") as caught:
        Task(model="mlp", data="minst")
    assert caught.value.facts["nearest"][0] == "mnist"


def test_lmdb_without_its_package_is_reported_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write("lmdb", tmp_path)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(DataError, match=r"data\.mdb is LMDB.*pip install 'syncline\[lmdb\]'"):
        scan(str(path), FileOptions())


def test_a_store_whose_package_is_missing_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import fsspec

    def missing(*args: object, **options: object) -> None:
        raise ImportError("no s3fs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(DataError, match=r"s3://bucket/x needs a package.*pip install 'syncline\[s3\]'"):
        scan("s3://bucket/x", FileOptions())
