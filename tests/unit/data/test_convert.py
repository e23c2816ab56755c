"""Converting: every format to every other keeps the samples, and nothing is overwritten or left half done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sample_files
from sample_files import ROWS, write

from syncline.config.spec import Spec
from syncline.data.files.convert import convert, readable
from syncline.data.files.writers import WRITERS
from syncline.errors import ConfigError, DataError


def silent(split: str, done: int, count: int) -> None:
    pass


def samples(path: Path, **options: object) -> dict[str, list[tuple[tuple[float, ...], str]]]:
    """The samples of each split, sorted, with the names of their classes: images in folders have another order.

    LMDB keeps no names, so that their numbers must do.
    """
    data = readable(Spec(str(path), options))
    names = data.info.class_names or [str(i) for i in range(data.info.classes or 0)]
    found = {}
    for split, count in (("train", data.info.train_samples), ("test", data.info.test_samples)):
        found[split] = []
        if count:
            inputs, targets = data.raw(split, np.arange(count))
            rows = inputs.reshape(count, -1).astype(np.float32).tolist()
            labels = [names[int(y)].removeprefix("class-") for y in targets]
            found[split] = sorted((tuple(x), y) for x, y in zip(rows, labels, strict=True))
    return found


@pytest.mark.parametrize("to", sorted(WRITERS))
@pytest.mark.parametrize("source", ["images", "lmdb"])
def test_images_survive_every_format(tmp_path: Path, source: str, to: str):
    path = write(source, tmp_path)
    data = readable(Spec(str(path), {"test_share": 0.25}))
    seen: list[tuple[str, int, int]] = []
    convert(data, tmp_path / "out", to, lambda *report: seen.append(report))
    assert seen == [("train", 18, 18), ("test", 6, 6)]
    assert samples(tmp_path / "out") == samples(path, test_share=0.25)


@pytest.mark.parametrize("to", ["parquet", "arrow", "csv", "lmdb"])
@pytest.mark.parametrize("source", ["parquet", "csv"])
def test_numbers_survive_every_format_for_them(tmp_path: Path, source: str, to: str):
    path = write(source, tmp_path)
    convert(readable(Spec(str(path))), tmp_path / "out", to, silent)
    assert samples(tmp_path / "out") == samples(path)


def test_shape_and_class_names_come_back_from_parquet(tmp_path: Path):
    convert(readable(Spec("digits")), tmp_path / "out", "parquet", silent)
    info = readable(Spec(str(tmp_path / "out"))).info
    assert (info.input_shape, info.train_samples, info.test_samples) == ((1, 8, 8), 1437, 360)
    assert info.class_names == tuple("0123456789")


def test_what_is_there_is_not_overwritten(tmp_path: Path):
    data = readable(Spec("iris"))
    convert(data, tmp_path / "out", "csv", silent)
    before = (tmp_path / "out" / "train.csv").read_bytes()
    with pytest.raises(DataError) as caught:
        convert(data, tmp_path / "out", "parquet", silent)
    assert caught.value.code == "target-exists"
    assert caught.value.facts["path"] == str(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["test.csv", "train.csv"]
    assert (tmp_path / "out" / "train.csv").read_bytes() == before


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path):
    path = write("parquet", tmp_path)

    def stop(split: str, done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(readable(Spec(str(path))), tmp_path / "out", "csv", stop)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith("part") or p.name == "out") == []


@pytest.mark.parametrize(
    ("data", "options", "to", "complaint"),
    [
        ("digits", {}, "images", r"\(1, 8, 8\)"),
        ("digits", {}, "xml", "'xml'"),
        ("table", {"label": "x0", "classes": 0}, "lmdb", "regression"),
        ("table", {"label": "none"}, "csv", "no labels"),
    ],
)
def test_what_a_format_cannot_hold_is_reported(tmp_path: Path, data: str, options: dict, to: str, complaint: str):
    name = str(sample_files.write_csv(tmp_path / "t.csv")) if data == "table" else data
    with pytest.raises((DataError, ConfigError), match=complaint):
        convert(readable(Spec(name, options)), tmp_path / "out", to, silent)
    assert not (tmp_path / "out").exists()


def test_a_text_in_windows_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("To be, or not to be. " * ROWS)
    data = readable(Spec("shakespeare", {"block": 16}), tmp_path)
    with pytest.raises(DataError, match="shakespeare"):
        convert(data, tmp_path / "out", "parquet", silent)
